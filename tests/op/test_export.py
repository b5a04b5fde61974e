"""Programs that run in another process: torch.export, AOTInductor, compiled code cached on disk."""

import io
import os
import subprocess
import sys

import pytest
import torch
from cases import ROOT
from cases.compiled import WINDOW, Attend, Distance, assert_same, leaves
from cases.relations import TOKENS, relations_with_data
from torch._dynamo.exc import UserError
from torch.export import Dim

import attnbias as ab
from attnbias.backends.call import Inputs
from attnbias.op.codec import Rest, join


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def lengths_are_dynamic():
    keys = Dim("keys", min=2)
    return {2: Dim("queries", min=2)}, {2: keys}, {2: keys}


by_reference = pytest.mark.xfail(
    torch.__version__ < "2.13", raises=UserError, reason="min(5 n, 10 n) was not 5 n"
)


@pytest.mark.parametrize(
    ("strict", "options"),
    [
        (True, {}),
        (False, {"q_start": "end"}),
        pytest.param(False, {"terms": [Distance()]}, marks=by_reference),
    ],
    ids=["strict", "end", "terms"],
)
def test_export_with_a_relation(strict, options):
    module = Attend(WINDOW, **options)
    exported = torch.export.export(
        module,
        leaves(20, 33, requires_grad=False),
        dynamic_shapes=lengths_are_dynamic(),
        strict=strict,
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file)):
        for lengths in ((64, 64), (7, 90)):
            assert_same(program.module(), module, *leaves(*lengths))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_layout(strict):
    class WithLayout(torch.nn.Module):
        def forward(self, q, k, v, layout):
            return ab.attention(q, k, v, layout, softcap=2.0)

    module = WithLayout()
    exported = torch.export.export(
        module,
        (*leaves(20, 33, requires_grad=False), WINDOW.layout(20, 33)),
        dynamic_shapes=(*lengths_are_dynamic(), [{0: Dim("entries")}, None]),
        strict=strict,
    )
    for relation, lengths in ((WINDOW, (20, 33)), (ab.Full(), (7, 90))):
        assert_same(exported.module(), module, *leaves(*lengths), relation.layout(*lengths))


# -- relations that hold data ----------------------------------------------------------------------


def run_program(path, result, seed):
    """Run in the other process, which has relations of the same texts with data of its own."""
    theirs = relations_with_data(seed)
    program = torch.export.load(path).module()
    torch.save([program(*leaves(TOKENS, requires_grad=False)), len(theirs)], result)


class AttendAll(torch.nn.Module):
    def __init__(self, relations):
        super().__init__()
        self.relations = relations

    def forward(self, q, k, v):
        return [ab.attention(q, k, v, relation) for relation in self.relations.values()]


def call_in_another_process(function, *arguments, **environment):
    """Call a function of this file in another process, with this environment and more variables."""
    folders = [str(ROOT / "tests"), os.path.dirname(__file__)]
    code = f"import sys; sys.path[:0] = {folders!r}; import test_export; "
    code += f"test_export.{function.__name__}(*{arguments!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **environment})


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_carries_its_relations_into_another_process(strict, tmp_path):
    """It named them by tokens, and ran on whichever relation had that token in the loading process."""
    module = AttendAll(relations_with_data(seed=1))
    inputs = leaves(TOKENS, requires_grad=False)
    torch.export.save(torch.export.export(module, inputs, strict=strict), tmp_path / "program.pt2")
    call_in_another_process(run_program, str(tmp_path / "program.pt2"), str(tmp_path / "result.pt"), 2)
    results, count = torch.load(tmp_path / "result.pt")
    assert len(results) == count == len(module.relations)
    for name, got, want in zip(module.relations, results, module(*inputs), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("strict", [False, True])
def test_a_function_cannot_be_exported(strict):
    module = Attend(ab.Where(lambda q, k: q >= k) & ab.Window(before=3))
    with pytest.raises(Exception, match=r"cannot carry a Python function or object; pass the layout of"):
        torch.export.export(module, leaves(20, requires_grad=False), strict=strict)


def call_op(tensors, text):
    """Call the op as a traced program does."""
    rest = Rest([], None, None, tensors, [], [], 0, 1.0, 0.0, 0.0, "", text, "", False)
    return torch.ops.attnbias.forward(*join(Inputs(*leaves(20)), rest))


def test_function_of_another_process_raises_at_run_time():
    text, (handle,), _ = ab.Where(lambda q, k: q >= k).recipe
    dead, foreign = handle.clone(), handle + torch.tensor([1, 0])
    del handle
    for gone in (dead, foreign):
        with pytest.raises(ValueError, match="is gone or in another process; pass a layout instead"):
            call_op([gone], text)


def test_undefined_class_is_named_at_run_time():
    with pytest.raises(
        ValueError, match=r"no class notebook\.Mine is defined in this process; import the mod"
    ):
        call_op([], "{'notebook.Mine': (3, )}")


def run_package(path, result, seed):
    theirs = relations_with_data(seed)
    program = torch._inductor.aoti_load_package(path)
    torch.save([program(*leaves(TOKENS, requires_grad=False)), len(theirs)], result)


@pytest.mark.slow
def test_an_aotinductor_package_carries_its_relations_into_another_process(tmp_path):
    module = AttendAll(relations_with_data(seed=1))
    inputs = leaves(TOKENS, requires_grad=False)
    exported = torch.export.export(module, inputs)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "program.pt2"))
    call_in_another_process(run_package, str(tmp_path / "program.pt2"), str(tmp_path / "result.pt"), 2)
    results, _ = torch.load(tmp_path / "result.pt")
    for name, got, want in zip(module.relations, results, module(*inputs), strict=True):
        assert torch.equal(got, want), name


def run_compiled(result, seed):
    module = AttendAll(relations_with_data(seed))
    compiled = torch.compile(module, fullgraph=True)
    torch.save(compiled(*leaves(TOKENS, requires_grad=False)), result)


@pytest.mark.slow
def test_code_cached_on_disk_runs_on_the_relations_of_each_process(tmp_path):
    for seed in (1, 2):
        call_in_another_process(
            run_compiled,
            str(tmp_path / f"{seed}.pt"),
            seed,
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        )
        module = AttendAll(relations_with_data(seed))
        want = module(*leaves(TOKENS, requires_grad=False))
        for name, mine, theirs in zip(
            module.relations, torch.load(tmp_path / f"{seed}.pt"), want, strict=True
        ):
            assert torch.equal(mine, theirs), name
