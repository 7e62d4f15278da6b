"""What each step of a FedHUR round has to compute and to move, and how long that takes at the machine's rates.

A floating-point operation is an addition or a multiplication: a product of ``(a, b)`` and ``(b, c)`` has ``2 a b c``.
Bytes are what must pass between memory and processor if every array is read or written once where it is used: caches
that hold an array make a step faster than its bytes say. Lower-order terms are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measuring import Rates
from benchmarks.probe import EIGENPAIRS, ENERGIES, FILTERS, FIT, QUERY, RANKING, SCORES, TRAINING, USERS
from fedhur_app.config import Settings
from fedhur_app.relations.filters import DENSE_ITEMS

SINGLE, DOUBLE = 4, 8  # bytes of a number
_KRYLOV = 6  # products with all tables that the block Krylov solver is counted with, as in benchmarks/scaling.py


@dataclass(frozen=True)
class Work:
    """Of one step, for one client or for the server.

    Attributes:
        flops32: Operations in float32.
        flops64: Operations in float64.
        bytes: Bytes moved.
    """

    flops32: float = 0.0
    flops64: float = 0.0
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Operations of both kinds."""
        return self.flops32 + self.flops64

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops32 + other.flops32, self.flops64 + other.flops64, self.bytes + other.bytes)

    def of_each(self, count: int) -> "Work":
        """The mean over `count` clients whose sum this is."""
        return Work(self.flops32 / count, self.flops64 / count, self.bytes / count)

    def arithmetic(self, rates: Rates) -> float:
        """Seconds of the operations at the rates of matrix products."""
        return self.flops32 / rates.flops32 + self.flops64 / rates.flops64

    def moving(self, rates: Rates) -> float:
        """Seconds of the bytes at the rate of a copy."""
        return self.bytes / rates.bytes

    def seconds(self, rates: Rates) -> float:
        """The larger of the two: what bounds the step."""
        return max(self.arithmetic(rates), self.moving(rates))


@dataclass(frozen=True)
class Sizes:
    """Of a run and one of its clients.

    Attributes:
        items: ``I``.
        clients: ``K``.
        dim: Width of the tables, ``d``.
        rank: Eigenpairs that travel, ``r``.
        users: Training items of each user of the client.
        ranked: Its users that have validation items.
        levels: Blocks ``B`` of each level and groups ``b`` in a block.
    """

    items: int
    clients: int
    dim: int
    rank: int
    users: Sequence[int]
    ranked: int
    levels: Sequence[tuple[int, int]] = ()


def training(sizes: Sizes, settings: Settings) -> Work:
    """Epochs of sampled pairs, matrix factorisation by Adam."""
    train, dim = settings.train, sizes.dim
    triples = sum(sizes.users) * train.negatives
    batches = -(-triples // train.batch_size)
    entries = (sizes.items + len(sizes.users)) * dim
    # A triple: two scores (4 d), the gradients of three rows (5 d) and their sums (3 d). Adam: about 12 an entry.
    flops = train.epochs * (12 * triples * dim + 12 * batches * entries)
    # A triple: three rows are read, three products written and read again, and added to (read, written): 15 d numbers.
    # An entry of Adam: gradient zeroed and read; parameter and two moments read and written: 8 numbers.
    moved = SINGLE * train.epochs * (15 * triples * dim + 8 * batches * entries)
    return Work(flops32=flops, bytes=moved)


def query(sizes: Sizes, settings: Settings) -> Work:
    """Group means, their Grams, the utility and its sketch, on all levels."""
    width = settings.relation.query_width
    flops = float(sizes.items * sizes.dim)  # sums over the finest groups
    for blocks, side in sizes.levels:
        # Z Z^T, H F_g, U P of every block
        flops += 2 * blocks * (side**2 * sizes.dim + side**3 + side**2 * width)
    return Work(flops32=flops, bytes=SINGLE * sizes.items * sizes.dim)


def fit(sizes: Sizes, settings: Settings) -> Work:
    """Fit to ``V M V^T`` (eq. 25): nothing has to be solved, but the table is turned to the present one."""
    items, dim, rank = sizes.items, sizes.dim, sizes.rank
    # V^T E and V C have the height of the tables, and V^T V for the error of the fit.
    flops = 2 * items * rank * (2 * dim + rank)
    # Small matrices: for the rotation a singular value decomposition (21 d^3, Golub and Van Loan) and two products.
    flops += 21 * dim**3 + 4 * rank * dim**2
    if settings.relation.kind != "none":
        flops += 9 * rank**3 + 2 * items * rank**2  # eigenpairs of M, and V turned to them
    # V is turned (read, written) and read three times, E read, the result written.
    return Work(flops32=flops, bytes=SINGLE * items * (5 * rank + 2 * dim))


def user_vectors(sizes: Sizes, settings: Settings) -> Work:
    """Closed-form user vectors, in float64."""
    dim = sizes.dim
    # E^T E, of which one half is enough, its Cholesky factor and inverse (d^3).
    flops = float(sizes.items * dim**2 + dim**3)
    for count in sizes.users:
        # Fewer items than unknowns: X C^-1 (2 n d^2), the Gram of that (2 n^2 d), a factorisation (n^3 / 3).
        dual = 2 * count * dim**2 + 2 * count**2 * dim + count**3 / 3
        flops += dual if count < dim else 2 * count * dim**2 + dim**3 / 3
    # The table is read, and written and read in float64.
    return Work(flops64=flops, bytes=(SINGLE + 2 * DOUBLE) * sizes.items * dim)


def ranking(sizes: Sizes, settings: Settings) -> Work:
    """Scores in float64, and passes over them for the list and for AUC."""
    scores = sizes.ranked * sizes.items
    # Scores written and read in float64; written in float32, read for the list, for ties and for AUC.
    moved = DOUBLE * sizes.items * sizes.dim + scores * (2 * DOUBLE + 4 * SINGLE)
    return Work(flops64=2 * scores * sizes.dim, bytes=moved)


def eigenpairs(sizes: Sizes, settings: Settings) -> Work:
    """The mean Gram of all tables and its top eigenpairs, see `mean_gram_eigenpairs`."""
    width = sizes.clients * sizes.dim
    work = _eigenpairs_of(sizes.items, width, sizes.rank)
    if settings.hierarchy.smoothing and settings.relation.kind != "none":
        # Once more, with the smoothed tables beside the others.
        work += _eigenpairs_of(sizes.items, 2 * width, sizes.rank)
    return work


def _eigenpairs_of(items: int, width: int, rank: int) -> Work:
    """Of tables with `width` columns together."""
    side = min(items, width)
    tables = SINGLE * items * width
    if side > DENSE_ITEMS and side > 2 * (rank + 16):
        # Each multiplication takes X (X^T c) for r + 16 columns.
        return Work(flops32=_KRYLOV * 4 * items * width * (rank + 16), bytes=_KRYLOV * 2 * tables)
    # A half of X X^T (or X^T X); tridiagonal form (4/3 n^3), and its reflections on r vectors (2 n^2 r).
    flops = max(items, width) * side**2 + 4 / 3 * side**3 + 2 * side**2 * rank
    # Half of the work on the tridiagonal form are products of the remaining triangle with one vector: n^3 / 6 numbers.
    return Work(flops32=flops, bytes=tables + SINGLE * (side**3 / 6 + 2 * side**2))


def energies(sizes: Sizes, settings: Settings) -> Work:
    """Energies of all candidates along all targets' queries: a product of upper triangles a block."""
    width, pairs = settings.relation.query_width, sizes.clients**2
    flops = sum(blocks * pairs * width * side * (side + 1) for blocks, side in sizes.levels)
    # Energies of q directions: written, then passed for the square root, the sum and the limit at zero.
    moved = SINGLE * sum(blocks for blocks, _ in sizes.levels) * pairs * width * 6
    return Work(flops32=float(flops), bytes=float(moved))


def scores(sizes: Sizes, settings: Settings) -> Work:
    """Features, the scorer's view of all pairs and its training, and the weights."""
    score, inputs = settings.score, settings.relation.query_width + 2
    pairs = sum(blocks for blocks, _ in sizes.levels) * sizes.clients**2
    network = 2 * inputs * score.hidden + 2 * score.hidden
    # A training step goes forward and twice back.
    flops = network * (pairs + 3 * score.steps * score.batch)
    # Features: copied together, centred, squared, divided, and read by the scorer, whose hidden layer is passed twice.
    moved = SINGLE * pairs * (8 * inputs + 4 * score.hidden + 10)
    return Work(flops32=float(flops), bytes=float(moved))


def filters(sizes: Sizes, settings: Settings) -> Work:
    """Item-level residuals in the common basis, for all clients together, see `shared_basis_filters`."""
    clients, rank, dim = sizes.clients, sizes.rank, sizes.dim
    groups = sizes.levels[settings.residual.item_level][0]
    # V^T E_k of all clients; in every group its Gram, and the mixture of all clients' Grams.
    flops = 2 * clients * sizes.items * rank * dim + 2 * groups * clients * rank**2 * (dim + clients)
    # The tables are read; in every group Grams and mixtures are written and read.
    moved = SINGLE * clients * (sizes.items * dim + groups * 5 * rank**2)
    return Work(flops32=float(flops), bytes=float(moved))


def counted(sizes: Sizes, settings: Settings) -> tuple[dict[str, Work], dict[str, Work]]:
    """Steps of a client and steps of the server, by the names of `benchmarks.probe`, as far as they are counted here.

    Counted are matrix factorisation by gradients, and what FedCIA and FedHUR do with filters that need no solving.
    """
    client: dict[str, Work] = {}
    server: dict[str, Work] = {}
    factorised = settings.model.kind == "mf"
    if factorised and settings.train.solver == "gradient" and settings.train.optimizer == "adam":
        client[TRAINING] = training(sizes, settings)
    relation, residual = settings.relation, settings.residual
    if settings.algorithm == "fedhur":
        related = relation.kind != "none"
        server[EIGENPAIRS] = eigenpairs(sizes, settings)
        if relation.kind == "utility":
            client[QUERY] = query(sizes, settings)
        if related and relation.match == "energy" and relation.kind == "utility":
            server[ENERGIES] = energies(sizes, settings)
            server[SCORES] = scores(sizes, settings)
        shared = related and residual.kind == "item" and residual.span == "shared"
        if shared:
            server[FILTERS] = filters(sizes, settings)
        if settings.align.solver == "exact" and (shared or not related):
            client[FIT] = fit(sizes, settings)
    if settings.user_refit.enabled:
        client[USERS] = user_vectors(sizes, settings)
    if settings.user_refit.enabled or factorised:
        client[RANKING] = ranking(sizes, settings)
    return client, server
