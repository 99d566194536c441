"""The register of private names: walked on the installed versions, and held against what the source uses."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_names
from private_names import PACKAGE, uses

from gpumem_magic import measure, private
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.notebook import devices
from gpumem_magic.private import REGISTER, RUN
from gpumem_magic.session import device
from gpumem_magic.virtual.engine import host_checks

NAMES = [(row, name, marks) for row in REGISTER for name, marks in row.names]


def installed(name: str) -> bool:
    package = name.partition(".")[0]
    return package != "FakeTensor" and importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(("row", "name", "marks"), NAMES, ids=[name for _, name, _ in NAMES])
def test_a_name_is_there_on_the_installed_versions(row: private.Dependence, name: str, marks: str) -> None:
    if not installed(name) or "*" in marks:
        pytest.skip("not installed" if not installed(name) else "only on live objects")
    if "?" in marks:
        return
    private.resolve(name)


def modules_of(row: private.Dependence) -> list[Path]:
    found = []
    for place in row.where:
        path = PACKAGE.joinpath(*place.partition(":")[0].split("."))
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        assert all(file.exists() for file in files), place
        assert ":" not in place or f"def {place.partition(':')[2]}(" in files[0].read_text("utf-8"), place
        found += files
    return found


@pytest.mark.parametrize("row", REGISTER, ids=[row.where[0] for row in REGISTER])
def test_what_a_row_has_is_used_where_it_says(row: private.Dependence) -> None:
    source = "\n".join(file.read_text("utf-8") for file in modules_of(row))
    # What a node keeps is read by its prefix.
    words = [name.rpartition(".")[2].replace("_raw_saved_result", "_raw_saved_") for name, _ in row.names]
    assert [word for word in words if word not in source] == []
    assert row.use
    assert row.lost


def test_no_private_name_is_used_that_is_not_registered() -> None:
    loose: list[str] = []
    files = [({file.relative_to(PACKAGE).as_posix() for file in modules_of(row)}, row) for row in REGISTER]
    for place, found in uses().items():
        module = place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        known = [name for where, row in files if place in where for name, _ in row.names]
        loose += [f"{module}: {use}" for use in sorted(found) if not any(_covers(name, use) for name in known)]
    assert loose == []


def _covers(name: str, use: str) -> bool:
    if "." not in use:
        return use in name.split(".") or (name.split(".")[-1].startswith(use) and use.endswith("_"))
    return name == use or name.startswith(f"{use}.") or use.startswith(f"{name}.")


def test_a_use_that_is_not_registered_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "import torch\nfrom torch._C import _one\nimport torch._two as two\n\n\n"
        "def f(tensor):\n    getattr(torch, '_three')\n"
        "    return tensor._four, torch._C.five, two.six, torch.ops.aten._seven.default, overloads('mm _eight.out')\n"
    )
    assert uses(tmp_path) == {
        "new.py": {
            "torch._C._one",
            "torch._two",
            "torch._two.six",
            "_three",
            "_four",
            "torch._C.five",
            "torch.ops.aten._seven",
            "torch.ops.aten._eight",
        }
    }


def test_the_versions_that_it_was_run_on_are_said_of_every_package() -> None:
    homes = {name.partition(".")[0] for _, name, _ in NAMES} - {"FakeTensor"}
    assert homes <= set(RUN)
    assert fnmatch(RUN["torch"], "2.9*2.15*")


# ---- where a name is missing


@pytest.fixture
def off() -> Iterator[None]:
    device.choose("T4")  # What PyTorch says of itself while it is imported for that is said by now.
    device.off()
    yield
    device.off()


def lines_of_turning_on() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device.choose("T4")
    return [str(one.message) for one in caught]


def test_a_missing_name_costs_its_own_feature_and_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, off: None
) -> None:
    vmap = importlib.import_module("torch._functorch.vmap")
    before = vmap._flat_vmap
    monkeypatch.delattr(vmap, "_flat_vmap")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    [line] = lines_of_turning_on()
    assert line.startswith("torch 2.99.0 has no torch._functorch.vmap._flat_vmap (run on 2.9.1")
    assert line.endswith("`torch.vmap` and `torch.func` lose their tensors' memory from sight.")
    assert "\n" not in line
    layer = torch.nn.Linear(4, 4).to("cuda")
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_cuda
    device.off()
    monkeypatch.setattr(vmap, "_flat_vmap", before, raising=False)
    assert lines_of_turning_on() == []


def test_what_every_part_needs_costs_the_virtual_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_dispatch_mode")
    with pytest.raises(DeviceError, match="_get_dispatch_mode") as caught:
        device.choose("T4")
    assert str(caught.value).endswith("there is no virtual GPU.")
    assert "\n" not in str(caught.value)
    assert device.off() == "No virtual device was on."
    assert "No virtual device is on." in devices.state()


def test_a_newer_pytorch_that_has_all_says_nothing(monkeypatch: pytest.MonkeyPatch, off: None) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert lines_of_turning_on() == []


def test_an_operator_that_is_missing_costs_its_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = private._Operators()._no_such_operator
    table: dict[Any, Any] = {missing.default: "rule", missing.out: "rule"}
    assert torch.ops.aten.mm.default not in table
    assert private._Operators().mm is torch.ops.aten.mm
    with pytest.raises(private.Missing, match="aten::_no_such_operator"):
        missing.default(torch.ones(1))
    rows = (
        *REGISTER,
        private.Dependence(("virtual.operators",), "for a try", "it is lost", (("torch.ops.aten._no_such", ""),)),
    )
    monkeypatch.setattr(private, "REGISTER", rows)
    monkeypatch.setattr(private, "_about", private._about.__wrapped__)
    assert "torch.ops.aten._no_such" in private.lacking("virtual.operators")
    assert private.lacking("virtual.operators.attention:Attention.install") == ""


def test_a_seam_of_a_recording_that_is_missing_is_a_note(monkeypatch: pytest.MonkeyPatch, off: None) -> None:
    checkpoint = importlib.import_module("torch.utils.checkpoint")
    monkeypatch.delattr(checkpoint, "_recomputation_hook")
    with measure("T4") as measurement:
        torch.ones(3, device="cuda", requires_grad=True).sum().backward()
    assert any("recomputation is seen in modules only" in note for note in measurement.report.notes)
    assert measurement.report.peak.allocated > 0


# ---- the oldest version


# Names that 2.9 lacks, and that the source asks for before it uses them.
ASKED_FOR = {"torch.accelerator.Graph", "torch.accelerator.graphs"}


def test_every_name_of_pytorchs_is_one_that_the_oldest_version_has() -> None:
    newer = {name: place for name, place in torch_names.uses().items() if name not in torch_names.of_oldest()}
    assert newer.keys() == ASKED_FOR, "see tests/torch_names.py"


def test_a_newer_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch import cuda\n\n\n"
        "def f(op):\n    return torch.Tag.newest in op.tags, F.newest(op.torch.x), cuda.newest\n"
    )
    assert torch_names.uses(tmp_path).keys() - torch_names.of_oldest() == {
        "torch.Tag.newest",
        "torch.nn.functional.newest",
        "torch.cuda.newest",
    }


def test_what_sums_up_is_what_pytorch_tags_so() -> None:
    if not hasattr(torch.Tag, "reduction"):
        pytest.skip("PyTorch has this tag since 2.10")
    # (`dir` would have those only that somebody has asked for by now.)
    names = {
        one.name.removeprefix("aten::") for one in torch._C._jit_get_all_schemas() if one.name.startswith("aten::")
    }
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    overloads = [
        getattr(packet, one) for packet in packets if hasattr(packet, "overloads") for one in packet.overloads()
    ]
    tagged = {one._schema.name.removeprefix("aten::") for one in overloads if torch.Tag.reduction in one.tags}
    assert tagged == {name for name in host_checks.REDUCTIONS if hasattr(torch.ops.aten, name)}
