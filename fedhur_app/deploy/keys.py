"""Certificates and keys of a deployment: an authority of its own, the server's certificate, one key pair a device.

All keys are ECDSA on the curve P-384: Flower takes keys of devices on NIST curves only.
"""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhur_app.files import replacing

# A clock that goes a little slow must not find a new certificate "not yet valid".
_CLOCK_SKEW = timedelta(hours=1)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read (mode 600), atomically."""
    with replacing(path, durable=True) as temporary:  # made with mode 600
        temporary.write_bytes(content)
        os.chmod(temporary, 0o600)


def make_authority(certificate: Path, key: Path, days: int) -> None:
    """Write a certificate authority: a certificate that signs itself, and its key.

    Args:
        certificate: File of the certificate (PEM).
        key: File of the private key (PEM, mode 600).
        days: Validity.
    """
    private = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedHUR deployment authority")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    signed = (
        _builder(name, name, private.public_key(), datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(private, hashes.SHA384())
    )
    write_private(key, _pem(private))
    _write_public(certificate, signed.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(
    certificate: Path, key: Path, hosts: Sequence[str], days: int, authority: Path, authority_key: Path
) -> None:
    """Write the server's certificate and key.

    Args:
        certificate: File of the certificate (PEM).
        key: File of the private key (PEM, mode 600).
        hosts: Names and IP addresses under which devices reach the server.
        days: Validity; cut where the authority's ends.
        authority: Certificate of the authority that signs.
        authority_key: Its private key.
    """
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    signer = serialization.load_pem_private_key(authority_key.read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    private = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    end = min(datetime.now(UTC) + timedelta(days=days), issuer.not_valid_after_utc)
    signed = (
        _builder(name, issuer.subject, private.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    write_private(key, _pem(private))
    _write_public(certificate, signed.public_bytes(serialization.Encoding.PEM))


def make_device_key(private: Path, public: Path, comment: str) -> None:
    """Write the key pair by which Flower knows a device, in the form of OpenSSH.

    Args:
        private: File of the private key (mode 600); it belongs on the device only.
        public: File of the public key, for the server.
        comment: Stands behind the public key.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(
        private,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    text = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_public(public, text + b" " + comment.encode() + b"\n")


def _write_public(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
        os.chmod(temporary, 0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_SKEW)
        .not_valid_after(end)
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
