"""torch.compile: the same results, and the number of compilations."""

import gc
import weakref

import pytest
import torch
from cases.compiled import WINDOW, Attend, Distance, assert_same, leaves
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attnbias as ab
from attnbias.integrations import pyg
from attnbias.op import dispatch


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def counted(function, **options):
    """Compile the whole function; ``count.frame_count`` is the number of compilations."""
    count = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=count, **options), count


def graph_of(count):
    """Return the functions that the compiled graphs call."""
    return [str(node.target) for graph in count.graphs for node in graph.graph.nodes]


# -- the same results ------------------------------------------------------------------------------

DOCUMENTS = ab.Documents(torch.arange(100) // 9)
MASK = torch.rand(100, 100, generator=torch.Generator().manual_seed(0)) < 0.2


@pytest.mark.parametrize("kind", ["relation", "layout"])
@pytest.mark.parametrize(
    ("dynamic", "lengths"), [(False, (33, 33)), (None, (33, 33)), (True, (1, 40)), (True, (65, 7))]
)
def test_compiled_equals_eager(kind, dynamic, lengths):
    def call(q, k, v, relation):
        return ab.attention(q, k, v, relation, softcap=2.0, return_lse=True)

    compiled, _ = counted(call, dynamic=dynamic)
    relation = WINDOW.layout(*lengths) if kind == "layout" else WINDOW
    assert_same(compiled, call, *leaves(*lengths), relation)


def test_compiled_by_inductor_equals_eager():
    def call(q, k, v, layout):
        weighted = ab.attention(2 * q, k + 1, v, WINDOW)
        return weighted + ab.attention(q, k, v, layout)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for length in (33, 40):
        q, k, v = leaves(length, order="BLHD")
        results = [run(q, k, v, WINDOW.layout(length, length)) for run in (compiled, call)]
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in results]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "options",
    [
        {"terms": [Distance()]},
        {"backend": "reference"},
        {"dropout_p": 0.3},
        {"q_start": "end"},
        {"scale": 0.3, "softcap": 3.0},
        {"sink": torch.zeros(4)},
    ],
    ids=["terms", "reference", "dropout", "end", "numbers", "sink"],
)
def test_compiled_options_equal_eager(options):
    module = Attend(WINDOW, return_lse=True, **options)
    compiled, _ = counted(module)
    assert_same(compiled, module, *leaves(20, 33))


def test_compiled_sdpa_by_name():
    module = Attend(ab.Causal(), backend="sdpa")
    compiled, _ = counted(module)
    assert_same(compiled, module, *leaves(20, 33))


def test_compiled_sdpa_where_it_is_the_default(monkeypatch):
    monkeypatch.setattr(dispatch.sdpa, "why_not_by_default", lambda problem: [])
    module = Attend(ab.Causal())
    compiled, count = counted(module, dynamic=True)
    for length in (33, 50, 64):
        assert_same(compiled, module, *leaves(length))
    assert count.frame_count == 1
    assert "attnbias.forward.default" not in graph_of(count)


def test_compiled_without_batch():
    module = Attend(WINDOW, return_lse=True)
    compiled, _ = counted(module)
    assert_same(compiled, module, *(x.detach()[0].requires_grad_() for x in leaves()))


def test_compiled_with_data():
    compiled, count = counted(Attend(DOCUMENTS))
    assert_same(compiled, Attend(DOCUMENTS), *leaves(100))
    assert count.frame_count == 1


def test_compiled_checkpointing_draws_the_same_dropout():
    def call(q, k, v):
        return ab.attention(q, k, v, WINDOW, dropout_p=0.4).sin()

    def checkpointed(q, k, v):
        return checkpoint(call, q, k, v, use_reentrant=False)

    compiled, _ = counted(checkpointed)
    assert_same(compiled, call, *leaves())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiled_under_autocast(dtype):
    module = Attend(WINDOW)
    compiled, count = counted(module)
    q, k, v = leaves()
    with torch.autocast("cpu", dtype):
        out = compiled(q, k, v)
        assert out.dtype == dtype and torch.equal(out, module(q, k, v))
    assert compiled(q, k, v).dtype == torch.float32 and count.frame_count == 2


# -- how often it compiles -------------------------------------------------------------------------


def test_new_layout_compiles_nothing():
    def call(q, k, v, layout):
        return ab.attention(q, k, v, layout)

    compiled, count = counted(call, dynamic=True)
    for relation in (ab.Causal(), ab.Window(before=5), ab.Full(), ab.Documents.from_lengths([33])):
        assert_same(compiled, call, *leaves(33), relation.layout(33, 33))
    for length in (34, 64, 129):
        assert_same(compiled, call, *leaves(length), WINDOW.layout(length, length))
    assert_same(compiled, call, *leaves(100), DOCUMENTS.layout(100, 100))
    heads = ab.PerHead([ab.Causal(), WINDOW, ab.Full(), ab.Full()])
    assert_same(compiled, call, *leaves(33), heads.layout(33, 33))
    assert count.frame_count == 1
    for lengths in ((20, 33), (33, 20), (7, 90)):
        assert_same(compiled, call, *leaves(*lengths), WINDOW.layout(*lengths))
    assert count.frame_count == 2


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_length_with_a_relation_compiles_nothing(dynamic):
    compiled, count = counted(Attend(WINDOW), dynamic=dynamic)
    first = 1 if dynamic else 2  # without dynamic=True the second length is what makes it dynamic
    for length in (33, 34, 64, 70):
        assert_same(compiled, Attend(WINDOW), *leaves(length))
        assert count.frame_count <= first


def test_new_relation_as_argument_compiles_once():
    def call(q, k, v, relation):
        return ab.attention(q, k, v, relation)

    compiled, count = counted(call, dynamic=True)
    relations = [ab.Causal(), DOCUMENTS & ab.Causal(), ab.Window(before=6)]
    for number, relation in enumerate(relations, start=1):
        assert_same(compiled, call, *leaves(100), relation)
        assert count.frame_count == number
    for length, equal in ((100, ab.Causal()), (50, ab.Causal() & ab.Window(before=6))):
        assert_same(compiled, call, *leaves(length), equal)
    assert_same(compiled, call, *leaves(100), relations[1])
    assert count.frame_count == len(relations)


def new_documents(seed, length=100):
    return ab.Documents(
        torch.randint(9, (2, length), generator=torch.Generator().manual_seed(seed)).sort().values
    )


@pytest.mark.parametrize("kind", ["relation", "layout", "made inside"])
@pytest.mark.parametrize("length", [20, 100])
def test_new_documents_every_step_compile_at_most_twice(kind, length):
    """Each batch of documents compiled again, and after eight of them everything ran in eager."""

    def call(q, k, v, relation):
        return ab.attention(q, k, v, relation if kind == "layout" else relation & ab.Window(before=7))

    def call_with_ids(q, k, v, ids):
        return ab.attention(q, k, v, ab.Documents(ids) & ab.Window(before=7))

    call = call_with_ids if kind == "made inside" else call
    compiled, count = counted(call)
    for step in range(12):
        # The length of a layout also changes from step to step, which would make a third compilation.
        relation = new_documents(step, length + 5 * (step > 5 and kind != "layout"))
        longest = relation.ids.shape[1]
        given = {
            "relation": relation,
            "layout": (relation & ab.Window(before=7)).layout(longest, longest),
            "made inside": relation.ids,
        }[kind]
        assert_same(compiled, call, *leaves(longest), given)
    assert count.frame_count <= 2


def test_new_functions_compile_once():
    def call(q, k, v, relation):
        return ab.attention(q, k, v, relation)

    compiled, count = counted(call)
    for step in range(4):
        assert_same(compiled, call, *leaves(), ab.Where(lambda q, k, reach=step: q - k == reach))
    assert count.frame_count == 1


@pytest.mark.parametrize("make", [new_documents, lambda seed: ab.Where(lambda q, k: q % 3 == k % 3)])
def test_relation_may_be_freed_before_backward(make):
    """Its data was freed before the compiled backward needed it."""

    def call(q, k, v, relation):
        return ab.attention(q, k, v, relation)

    compiled, _ = counted(call)
    q, k, v = leaves(100)
    grads = []
    for function in (compiled, call):
        out = function(q, k, v, make(0))
        gc.collect()
        grads.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    for mine, given in zip(*grads, strict=True):
        assert torch.equal(mine, given)


def test_relations_of_a_compiled_call_are_freed():
    """The op keeps no reference to the caller's relation."""
    compiled, _ = counted(ab.attention)
    inputs = [x.detach() for x in leaves(100)]
    relations = [new_documents(seed) & ab.Where(lambda q, k: q >= k) for seed in range(3)]
    for relation in relations:
        compiled(*inputs, relation)
    watched = [weakref.ref(part) for relation in relations for part in (relation, *relation.parts)]
    del relations, relation
    gc.collect()
    assert not any(ref() for ref in watched)


def test_memory_that_a_program_reuses_holds_two_relations():
    """Inductor writes new ids into the same tensor, which PyTorch does not count as a change."""
    ids = torch.arange(33)

    def call(x):
        for period in (2, 3):
            x = ab.attention(x, x, x, ab.Documents((ids + (x.sum() > 1e9)) % period))
        return x

    x = torch.randn(1, 1, 33, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(call)(x), call(x))


def test_new_function_with_the_same_documents_is_not_taken_for_an_old_one():
    """A new handle at the address of a freed one was mistaken for it."""
    compiled, _ = counted(ab.attention)
    documents, inputs = new_documents(0), [x.detach() for x in leaves(100)]
    for step in range(50):
        relation = documents & ab.Where(lambda q, k, n=step % 9 + 2: (q + k) % n == 0)
        assert torch.equal(compiled(*inputs, relation), ab.attention(*inputs, relation)), step


def test_functions_of_several_calls_live_until_backward():
    compiled, _ = counted(ab.attention)
    q, k, v = leaves(100)
    documents, grads = new_documents(0), []
    for function in (compiled, ab.attention):
        later = function(q, k, v, documents & ab.Where(lambda q, k: q >= k))
        earlier = function(q, k, v, documents & ab.Where(lambda q, k: MASK[q][k]))
        grads.append(torch.autograd.grad((later + earlier).sin().sum(), (q, k, v)))
    for mine, given in zip(*grads, strict=True):
        assert torch.equal(mine, given)


def test_new_relation_in_a_module_compiles_once():
    module = Attend(ab.Causal())
    compiled, count = counted(module, dynamic=True)
    for number, relation in enumerate((ab.Causal(), WINDOW, ab.Full()), start=1):
        module.relation = relation
        for length in (33, 50):
            assert_same(compiled, module, *leaves(length))
            assert count.frame_count == number


MAKERS = {
    "window": lambda: ab.Causal() & ab.Window(before=255),
    "chunks": lambda: ab.Causal() & ab.Chunks(4),
    "prefix": lambda: ab.Causal() | ab.Prefix(3),
    "reverse": lambda: ab.Window(before=3).T.shift(1),
    "heads": lambda: ab.PerHead([ab.Causal(), ab.Full(), ab.Columns(3), ab.Dilated(2, before=3)]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_relation_made_inside_compiles_once(make):
    def call(q, k, v):
        return ab.attention(q, k, v, make())

    compiled, count = counted(call, dynamic=True)
    for length in (33, 70):
        assert_same(compiled, call, *leaves(length))
    assert count.frame_count == 1


def test_each_number_in_a_relation_made_inside_compiles_once():
    def call(q, k, v, before):
        return ab.attention(q, k, v, ab.Causal() & ab.Window(before=before))

    compiled, count = counted(call, dynamic=False)
    for before in (3, 4, 3, 4):
        assert_same(compiled, call, *leaves(), before)
    assert count.frame_count == 2


def test_q_start_is_a_symbol():
    def call(q, k, v, q_start):
        return ab.attention(q, k, v, ab.Causal(), q_start=q_start)

    compiled, count = counted(call, dynamic=True)
    for q_start in (5, 9, 3, -2):
        assert_same(compiled, call, *leaves(20, 33), q_start)
    assert count.frame_count == 1


def test_decoding_compiles_once():
    module = Attend(WINDOW, q_start="end")
    compiled, count = counted(module, dynamic=True)
    for length in range(9, 14):
        assert_same(compiled, module, *leaves(1, length))
    assert count.frame_count == 1


# -- backends and errors ---------------------------------------------------------------------------


def test_use_backend_around_and_inside_a_compiled_function():
    module = Attend(WINDOW)
    compiled, count = counted(module)
    inputs = leaves()
    for name, frames in (("rows", 1), ("reference", 2), ("rows", 2), ("reference", 2)):
        with ab.use_backend(name):
            assert_same(compiled, module, *inputs)
        assert count.frame_count == frames
    forwards = [any("attnbias" in str(n.target) for n in g.graph.nodes) for g in count.graphs]
    assert forwards == [True, False]

    def inside(q, k, v):
        with ab.use_backend("reference"):
            return ab.attention(q, k, v, WINDOW)

    compiled, count = counted(inside)
    assert_same(compiled, inside, *inputs)
    assert "attnbias.forward.default" not in graph_of(count)
    assert ab.explain(*inputs).backend != "reference"


def test_layout_for_other_lengths_raises_at_run_time():
    def call(q, k, v, layout, q_start):
        return ab.attention(q, k, v, layout, q_start=q_start)

    compiled, _ = counted(call, dynamic=True)
    compiled(*leaves(33), WINDOW.layout(33, 33), 0)
    with pytest.raises(ValueError, match="for 34 queries and 34 keys, query and key have 33 and 33"):
        compiled(*leaves(33), WINDOW.layout(34, 34), 0)
    with pytest.raises(ValueError, match="built with q_start=3, got 0"):
        compiled(*leaves(33), WINDOW.layout(33, 33, q_start=3), 0)


def test_relation_for_other_lengths_raises_at_run_time():
    compiled, _ = counted(Attend(DOCUMENTS), dynamic=True)
    compiled(*leaves(100))
    with pytest.raises(ValueError, match="for 100 keys, got k_len = 90"):
        compiled(*leaves(90))


def test_named_backend_that_cannot_run_raises_at_run_time(monkeypatch):
    compiled, _ = counted(Attend(WINDOW, backend="rows"))
    monkeypatch.setattr(dispatch.rows, "why_not", lambda problem: ["moon: wrong phase"])
    with pytest.raises(NotImplementedError, match="backend 'rows' cannot run this: moon"):
        compiled(*leaves())


@pytest.mark.parametrize(
    "options", [{"backend": "reference"}, {"terms": [Distance()]}], ids=["reference", "terms"]
)
def test_reference_traced_with_a_layout_is_refused(options):
    def call(q, k, v, layout):
        return ab.attention(q, k, v, layout, **options)

    words = "while tracing, only a relation is taken, got a Layout"
    with pytest.raises(Exception, match=words):
        counted(call)[0](*leaves(33), WINDOW.layout(33, 33))


# -- sizes and edges -------------------------------------------------------------------------------


def test_compiled_reference_checks_the_relation():
    """It ran at sizes that the relation does not fit."""
    compiled = torch.compile(
        lambda q, relation: ab.attention(q, q, q, relation, backend="reference"), backend="eager"
    )
    with pytest.raises(Exception, match="this Documents is for 8 keys, got k_len = 16"):
        compiled(torch.randn(1, 1, 16, 4), ab.Documents([0] * 8))
    with pytest.raises(Exception, match="this Padding has batch 2, got batch 3"):
        compiled(torch.randn(3, 1, 16, 4), ab.Padding([2, 3]))


def test_numbers_of_edges_and_additive_scores():
    graph = ab.Graph(torch.randint(0, 40, (2, 300)), num_nodes=40)
    leaves = [*torch.randn(3, 1, 2, 40, 4), torch.randn(300, 2), torch.randn(2, 4)]

    def run(q, k, v, bias, weight):
        terms, score = [ab.EdgeBias(bias)], ab.AdditiveScore(weight)
        return ab.attention(q, k, v, graph, terms=terms, score=score)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for call in (run, compiled):
        given = [x.detach().requires_grad_() for x in leaves]
        out = call(*given)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("edge_dim", [None, 3, -1])
@pytest.mark.parametrize("layer", ["TransformerConv", "GATConv", "GATv2Conv"])
def test_a_graph_layer_compiles_to_one_graph(layer, edge_dim):
    """It does if it was called with the graph before, because adding loops depends on the graph's data."""
    index = torch.randint(20, (2, 60), generator=torch.Generator().manual_seed(0))
    x, graph = torch.randn(20, 6), ab.Graph(index, num_nodes=20)
    attr = None if edge_dim is None else torch.randn(60, 3)
    net = getattr(pyg, layer)(6, 4, heads=2, edge_dim=edge_dim)
    want = net(x, graph, attr)
    compiled, _ = counted(lambda x: net(x, graph, attr))
    assert torch.equal(compiled(x), want)


@pytest.mark.parametrize("count", [59, 61])
def test_numbers_for_other_edges_raise_at_run_time(count):
    graph = ab.Graph(torch.arange(120).view(2, 60) % 20, num_nodes=20)
    q, k, v = torch.randn(3, 1, 2, 20, 4)
    compiled, _ = counted(lambda bias: ab.attention(q, k, v, graph, terms=[ab.EdgeBias(bias)]))
    with pytest.raises(
        ValueError, match=rf"^terms: EdgeBias.bias: wanted 60 numbers, one per edge, got {count}$"
    ):
        compiled(torch.zeros(count))
