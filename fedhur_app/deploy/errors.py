"""The error of this package."""


class DeployError(ValueError):
    """A deployment that cannot be made, found, reached or driven; the text says what to do."""
