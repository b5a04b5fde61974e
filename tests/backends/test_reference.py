"""The plain reference against the textbook computation in the same dtype and in float64."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.exc import UserError
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnbias.backends.reference import formula as reference
from attnbias.backends.strides import empty_like_query
from attnbias.testing import assert_no_worse, eager, lengths, magnitudes, make_inputs

SEED = torch.tensor([2**40 + 17])


class Counted:
    """A relation with given counts [batch, heads, Q, K], whose rows start at q_start."""

    def __init__(self, counts, q_start=0, *, often=True):
        self.counts, self.q_start, self.often = counts, q_start, often

    def _look_up(self, q, k, b, h):
        batch, heads = self.counts.shape[:2]
        return self.counts[b % batch, h % heads, q - self.q_start, k]

    def related(self, q, k, b=None, h=None):
        return self._look_up(q, k, b, h) > 0

    def multiplicity(self, q, k, b=None, h=None):
        return self._look_up(q, k, b, h) if self.often else None


class Window:
    """Keys at most two before the query: a relation without data, which can be traced."""

    def related(self, q, k, b=None, h=None):
        return (k <= q) & (k >= q - 2) & (q % 5 != 3)

    def multiplicity(self, q, k, b=None, h=None):
        return None


class Rows:
    """A layout that holds only its rows."""

    def __init__(self, counts):
        self.counts = counts

    def rows(self, start, stop):
        return self.counts[:, :, start:stop]


class Table:
    """A score term: a number by head and distance; -inf removes the pair."""

    def __init__(self, table):
        self.table = table  # [H, distances]

    def value(self, b, h, q, k):
        assert [x.dim() for x in (b, h, q, k)] == [4] * 4
        far = self.table.shape[1] - 1
        return self.table[h, (q - k + 2).clamp(0, far)] + 0.25 * b


@dataclass
class Stub:
    """A problem that accepts the relations and layouts above."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    relation: object = None
    layout: object = None
    terms: tuple = ()
    score: object = None
    scale: float = 0.5
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    dropout_p: float = 0.0
    q_start: int = 0
    seed: torch.Tensor | None = None
    places: object = None


def problem(query, key, value, relation=None, **options):
    options.setdefault("scale", query.shape[-1] ** -0.5)
    options.setdefault("seed", SEED)  # not a default of the class, which does not compile before torch 2.12
    return Stub(query, key, value, relation, **options)


def draw_counts(batch, heads, Q, K, seed=0, most=3):
    """Draw random counts with an empty row and an empty column if there is room."""
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (batch, heads, Q, K), generator=rng)
    counts[:, :, Q // 2] = 0
    counts[0, -1, : Q // 3] = 0
    if K > 1:
        counts[..., K // 2] = 0
    return counts


OPTIONS = {
    "plain": {},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -1.3},
    "softcap": {"softcap": 0.7, "scale": 1.0},
    "sink": {"sink": True},
    "terms": {"terms": True},
    "dropout": {"dropout_p": 0.3},
    "drop all": {"dropout_p": 1.0},
    "q_start": {"q_start": 5, "terms": True, "dropout_p": 0.5},
    "negative q_start": {"q_start": -3, "terms": True, "dropout_p": 0.5},
    "all": {"softcap": 2.0, "sink": True, "terms": True, "dropout_p": 0.2, "q_start": 9},
}


def leaves_of(made, options):
    """Return the tensors to differentiate: query, key, value, and optionally a sink and a table."""
    query, heads = made[0], made[0].shape[1]
    rng = torch.Generator().manual_seed(5)
    sink = torch.randn(heads, generator=rng, dtype=torch.float64)
    table = torch.randn(heads, 8, generator=rng, dtype=torch.float64)
    table[:1, 3] = -math.inf
    leaves = list(made)
    for name, x in (("sink", sink), ("terms", table)):
        if options.get(name):
            leaves.append(x.to(query.dtype))
    return [x.detach().requires_grad_() for x in leaves]


def unpack(leaves, options):
    """Return the arguments of a problem from its leaves."""
    options, rest = dict(options), list(leaves[3:])
    for name in ("sink", "terms"):
        if options.get(name):
            options[name] = rest.pop(0)
    if "terms" in options:
        options["terms"] = (Table(options["terms"]),)
    return options


def draw_gradients(B, H, Q, E):
    rng = torch.Generator().manual_seed(11)
    grad_out = torch.randn(B, H, Q, E, generator=rng, dtype=torch.float64)
    return grad_out, torch.randn(B, H, Q, generator=rng, dtype=torch.float64)


def differentiate(run, leaves):
    """Return results and gradients; the incoming gradients depend only on the shapes."""
    results = run(leaves)
    grads = [x.to(y.dtype) for x, y in zip(draw_gradients(*results[0].shape), results, strict=True)]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


def run_reference(relation, options, **more):
    def run(leaves):
        given = unpack(leaves, options) | more
        return reference.attend(problem(*leaves[:3], relation, **given))

    return run


def run_eager(counts, options):
    def run(leaves):
        given = {"seed": SEED.to(leaves[0].device)} | unpack(leaves, options)
        return eager(*leaves[:3], counts=counts, **given)

    return run


def compare(made, counts, options, got):
    """Check results and gradients of ``got`` against eager in the same dtype and in float64."""
    empty = (counts == 0).all(-1, keepdim=True)
    leaves = leaves_of(made, options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    mine = differentiate(got, leaves)
    same = differentiate(run_eager(counts, options), leaves)
    oracle = differentiate(run_eager(counts, options), exact)
    if options.get("dropout_p") == 1:
        assert not mine[0].any()
    gradients = draw_gradients(*mine[0].shape)
    sizes = magnitudes(*made, *gradients, options.get("scale", made[0].shape[-1] ** -0.5))
    names = ["out", "lse", "query", "key", "value", "sink", "sink"]  # terms are judged as sinks
    for name, x, y, z in zip(names, mine, same, oracle, strict=False):
        factor = 2.0 if name in ("out", "lse") else 3.0
        zero = empty if name in ("out", "query") else None
        assert_no_worse(name, x, y, z, factor, empty=zero, magnitude=sizes[name])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2)], ids=str)
def test_reference_matches_the_textbook(name, heads):
    H, Hk = heads
    options = OPTIONS[name]
    made = make_inputs(1, 2, H, Hk, 13, 17, 8, 5)
    counts = draw_counts(2, H, 13, 17)
    relation = Counted(counts, options.get("q_start", 0))
    compare(made, counts, options, run_reference(relation, options))


@pytest.mark.parametrize(("Q", "K"), list(itertools.product(lengths(), repeat=2)))
def test_reference_matches_the_textbook_at_ragged_lengths(Q, K):
    made = make_inputs(2, 2, 2, 1, Q, K, 7, 9, order="BLHD", strided=True)
    counts = draw_counts(1, 2, Q, K, most=1)
    relation = Counted(counts, often=False)
    compare(made, counts, {}, run_reference(relation, {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_reference_rounds_half_precision_once(dtype, name):
    options = OPTIONS[name]
    made = make_inputs(3, 2, 4, 2, 65, 97, 16, 16, dtype)
    counts = draw_counts(2, 4, 65, 97)
    relation = Counted(counts, options.get("q_start", 0))
    compare(made, counts, options, run_reference(relation, options))
    out, lse = reference.attend(problem(*made, relation))
    wide, wide_lse = reference.attend(problem(*(x.float() for x in made), relation))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(lse, wide_lse)


def test_reference_accumulates_half_gradients_of_strips_before_rounding():
    made = make_inputs(3, 1, 2, 1, 64, 32, 8, 8, torch.bfloat16, requires_grad=True)
    relation = Counted(draw_counts(1, 1, 64, 32), often=False)
    narrow = torch.autograd.grad(reference.attend(problem(*made, relation), elements=4 * 32)[0].sum(), made)
    wide = [x.detach().float().requires_grad_() for x in made]
    exact = torch.autograd.grad(reference.attend(problem(*wide, relation))[0].sum(), wide)
    for one, other in zip(narrow, exact, strict=True):
        error = (one.float() - other).abs().max()
        assert error <= torch.finfo(torch.bfloat16).eps * other.abs().max()


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("elements", [1, 100, 700])
def test_reference_in_strips_matches_the_textbook(name, elements):
    options = OPTIONS[name]
    made = make_inputs(4, 2, 4, 2, 13, 17, 8, 5)
    counts = draw_counts(2, 4, 13, 17)
    relation = Counted(counts, options.get("q_start", 0))

    def run(leaves):
        given = problem(*leaves[:3], relation, **unpack(leaves, options))
        return reference.attend(given, elements=elements)

    compare(made, counts, options, run)


def test_reference_on_the_rows_of_a_layout_gives_the_same():
    options = OPTIONS["all"]
    made = make_inputs(5, 2, 4, 2, 13, 17, 8, 5)
    counts = draw_counts(1, 4, 13, 17)
    by_relation = run_reference(Counted(counts, 9), options)(leaves_of(made, options))
    by_layout = run_reference(None, options, layout=Rows(counts))(leaves_of(made, options))
    assert all(torch.equal(x, y) for x, y in zip(by_relation, by_layout, strict=True))
    given = problem(*(x.double() for x in made), layout=Rows(counts), q_start=9)
    strips = reference.attend(given, elements=3 * 2 * 4 * 17)
    for x, y in zip(strips, reference.attend(given), strict=True):
        torch.testing.assert_close(x, y)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return made


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_reference_bounds_the_scores_alive_in_both_passes(dropout_p, monkeypatch):
    made = make_inputs(6, 1, 2, 1, 512, 300, 4, 4, requires_grad=True)
    bound = 10 * 2 * 301
    monkeypatch.setattr(reference, "STRIP_ELEMENTS", bound)
    with Largest() as largest:
        out, lse = reference.attend(problem(*made, Window(), dropout_p=dropout_p))
        torch.autograd.grad(out.sum() + lse[:, :, 0].sum(), made)
    assert largest.elements <= bound
    assert bound < 2 * 512 * 300


def test_strip_has_at_least_one_row_and_at_most_the_limit():
    made = make_inputs(6, 1, 2, 1, 64, 3000, 1, 1)
    with Largest() as largest:
        reference.attend(problem(*made, Window()), elements=1)
    assert largest.elements == 2 * 3001


def test_reference_keeps_no_scores_for_backward():
    made = make_inputs(6, 1, 2, 1, 512, 300, 4, 4, requires_grad=True)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        reference.attend(problem(*made, Window()), elements=10 * 2 * 300)
    assert sum(kept.values()) <= sum(x.numel() for x in made)


@pytest.mark.parametrize("elements", [None, 60])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_reference_has_first_and_second_derivatives(name, elements):
    options = OPTIONS[name]
    made = make_inputs(7, 1, 2, 1, 4, 5, 2, 3, torch.float64)
    relation = Counted(draw_counts(1, 2, 4, 5, most=2), options.get("q_start", 0))
    leaves = leaves_of(made, options)

    def run(*leaves):
        given = problem(*leaves[:3], relation, **unpack(leaves, options))
        out, lse = reference.attend(given, elements=elements)
        return out, lse.masked_fill(lse == -math.inf, 0)

    if options.get("terms"):
        leaves[-1] = leaves[-1].detach().nan_to_num(neginf=0.3).requires_grad_()
    assert gradcheck(run, leaves)
    assert gradgradcheck(run, leaves)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("elements", [None, 1])
def test_empty_rows_give_zeros_and_zero_gradients(sink, elements):
    made = make_inputs(8, 2, 2, 1, 5, 6, 4, 3)
    relation = Counted(torch.zeros(1, 1, 5, 6, dtype=torch.int64))
    leaves = leaves_of(made, {"sink": sink})
    given = problem(*leaves[:3], relation, **unpack(leaves, {"sink": sink} if sink else {}))
    out, lse = reference.attend(given, elements=elements)
    assert not out.any()
    wanted = leaves[3] if sink else torch.full((2,), -math.inf)
    assert torch.equal(lse, wanted[:, None].expand(2, 2, 5))
    grads = torch.autograd.grad((out.sum(), lse.sum()), leaves)
    assert not any(grad.any() for grad in grads[:3])
    if sink:
        assert torch.equal(grads[3], torch.full((2,), 10.0))


def test_row_whose_pairs_are_removed_by_a_term_is_empty():
    query, key, value = made = make_inputs(9, 1, 1, 1, 3, 4, 4, 3, requires_grad=True)
    table = torch.tensor([[0.0, -math.inf, 1.0, 2.0, 3.0]])
    table = table.requires_grad_()
    counts = torch.zeros(1, 1, 3, 4, dtype=torch.int64)
    counts[0, 0, 0, 1] = counts[0, 0, 1, 2] = counts[0, 0, 1, 1] = 1  # distances -1; -1 and 0
    out, lse = reference.attend(problem(query, key, value, Counted(counts), terms=[Table(table)]))
    assert lse[0, 0].isfinite().tolist() == [False, True, False]
    assert not out[0, 0, 0].any()
    assert torch.equal(out[0, 0, 1], value[0, 0, 1])
    grads = torch.autograd.grad(out.square().sum() + lse[0, 0, 1], (*made, table))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 0, 0].any()


@pytest.mark.parametrize(
    "sizes",
    [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 4, 2, 0, 4), (2, 4, 2, 3, 0), (1, 1, 1, 0, 0)],
    ids=str,
)
def test_zero_lengths_work(sizes):
    B, H, Hk, Q, K = sizes
    leaves = leaves_of(make_inputs(0, B, H, Hk, Q, K, 4, 5), {"sink": True} if H else {})
    relation = Counted(torch.ones(1, 1, Q, K, dtype=torch.int64))
    sink = leaves[3] if H else None
    out, lse = reference.attend(problem(*leaves[:3], relation, sink=sink, dropout_p=0.5))
    assert out.shape == (B, H, Q, 5)
    assert not out.any()
    if K == 0 and Q:
        assert torch.equal(lse, sink[:, None].expand(B, H, Q))
    grads = torch.autograd.grad((out.sum(), lse.sum()), leaves)
    assert [x.shape for x in grads] == [x.shape for x in leaves]


def test_a_query_head_reads_its_own_key_head():
    query, key, value = make_inputs(0, 1, 6, 3, 2, 4, 4, 1)
    value = torch.arange(3.0)[None, :, None, None].expand(1, 3, 4, 1)
    out, _ = reference.attend(problem(query, key, value, Window()))
    assert out[0, :, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_two_edges_count_as_one_with_log_2():
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 2, 1)
    value = torch.tensor([[[[0.0], [3.0]]]])
    out, lse = reference.attend(problem(query, key, value, Counted(torch.tensor([[[[1, 2]]]]))))
    assert out.item() == 2
    assert lse.item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("order", ["BHLD", "BLHD", "LBHD", "LHBD"])
@pytest.mark.parametrize("elements", [None, 40])
def test_out_has_the_querys_stride_order(order, elements):
    made = make_inputs(0, 2, 4, 2, 5, 6, 8, 3, torch.float16, order=order, strided=True)
    out, _ = reference.attend(problem(*made, Window()), elements=elements)
    by_stride = sorted(range(4), key=lambda d: -made[0].stride(d))
    assert out.permute(by_stride).is_contiguous()


def test_empty_like_query_of_expanded_empty_and_permuted_queries():
    query = torch.zeros(1, 3, 5, 8).expand(2, 3, 5, 8)
    assert empty_like_query(query, 4).is_contiguous()
    assert empty_like_query(torch.zeros(2, 3, 0, 8), 4).shape == (2, 3, 0, 4)
    last_is_outer = torch.zeros(2, 8, 3, 5).permute(0, 2, 3, 1)
    assert empty_like_query(last_is_outer, 4).is_contiguous()
    assert empty_like_query(torch.zeros(2, 3, 5, 8, dtype=torch.float16), 4).dtype == torch.float16


@pytest.mark.parametrize("elements", [None, 40])
def test_autocast_changes_nothing(elements):
    made = make_inputs(0, 2, 4, 2, 5, 6, 8, 3, requires_grad=True)

    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            out, lse = reference.attend(problem(*made, Window()), elements=elements)
        grads = torch.autograd.grad(out.sum() + lse[:, :, 0].sum(), made)
        results.append((out, lse, *grads))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_reference_has_shapes_on_the_meta_device():
    made = [x.to("meta") for x in make_inputs(0, 2, 4, 2, 5, 6, 8, 3, torch.float16)]
    out, lse = reference.attend(problem(*made, Window(), sink=torch.zeros(4, device="meta")))
    assert (out.shape, out.dtype) == ((2, 4, 5, 3), torch.float16)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 32).view(4, 8))
        self.sink = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, query, key, value, seed):
        given = {"terms": (Table(self.table),), "sink": self.sink, "softcap": 3.0}
        given |= {"dropout_p": 0.25, "seed": seed, "q_start": key.shape[2] - query.shape[2]}
        return reference.attend(problem(query, key, value, Window(), **given))


def check_traced(traced, module):
    for Q, K in ((33, 47), (47, 33), (20, 20)):
        made = make_inputs(Q, 2, 4, 2, Q, K, 8, 5, requires_grad=True)
        leaves = (*made, *module.parameters())
        oracle = [x.detach().double().requires_grad_() for x in made]
        exact = Module().double()
        exact.load_state_dict(module.state_dict())
        parties = ((traced, made, leaves), (module, made, leaves))
        parties += ((exact, oracle, (*oracle, *exact.parameters())),)
        results = []
        for function, inputs, wanted in parties:
            out, lse = function(*inputs, SEED)
            loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()
            results.append((out, lse, *torch.autograd.grad(loss, wanted)))
        for i, (x, y, z) in enumerate(zip(*results, strict=True)):
            assert_no_worse(f"result {i} of {Q} x {K}", x, y, z, 2.0 if i < 2 else 3.0)


# Small enough that some of the lengths above would need strips if they were not traced.
FEW = 2 * 4 * 30 * 30


def test_reference_compiles_whole_and_once_for_all_lengths(monkeypatch):
    monkeypatch.setattr(reference, "STRIP_ELEMENTS", FEW)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    module = Module()
    check_traced(torch.compile(module, fullgraph=True, dynamic=True, backend=counter), module)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.xfail(torch.__version__ < "2.13", raises=UserError, reason="min(5 n, 10 n) was not 5 n")
def test_reference_exports_for_all_lengths(monkeypatch):
    monkeypatch.setattr(reference, "STRIP_ELEMENTS", FEW)
    module = Module()
    made = make_inputs(0, 2, 4, 2, 12, 14, 8, 5)
    q_len, k_len = torch.export.Dim("q_len"), torch.export.Dim("k_len")
    shapes = ({2: q_len}, {2: k_len}, {2: k_len}, None)
    exported = torch.export.export(module, (*made, SEED), dynamic_shapes=shapes)
    for Q, K in ((33, 47), (47, 33), (20, 20)):
        made = make_inputs(Q, 2, 4, 2, Q, K, 8, 5)
        monkeypatch.setattr(reference, "STRIP_ELEMENTS", 2**24)
        for x, y in zip(exported.module()(*made, SEED), module(*made, SEED), strict=True):
            assert torch.equal(x, y)


def test_reference_why_not():
    made = make_inputs(0, 1, 1, 1, 2, 2, 2, 2)
    assert reference.name == "reference"
    assert reference.why_not(problem(*made, Window())) == []
