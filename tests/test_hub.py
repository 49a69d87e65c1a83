"""The layout for Hugging Face's `kernels`: what is in it; kernels and transformers load it.

Would catch metadata that `kernels` does not read, a variant that it does not find, two copies of
the ops in one process, and a model whose logits or tokens differ from those with the attention
implementation of this package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from forked import run_python

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(flash_ext.__file__).resolve().parent
RECORDED = {"targets": "80+PTX;90a", "cuda": "13.0", "digest": "0" * 16}
RECORDED |= {"version": flash_ext.__version__}
CUDA_VARIANT = "torch-stable-abi211-cu130-x86_64-linux"

sys.path.insert(0, str(ROOT / "distribution"))
import make_hub  # noqa: E402

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="needs the package kernels"
)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a wheel with the package as it is here."""
    folder = tmp_path_factory.mktemp("hub")
    path = PACKAGE / "_C.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record = {n: x for n, x in record.items() if x} | {"targets": RECORDED["targets"]}
    with zipfile.ZipFile(folder / "x.whl", "w") as archive:
        archive.writestr("flash_ext/_C.json", json.dumps(RECORDED | record))
        archive.writestr("flash_ext-1.dist-info/METADATA", "not the package's")
        for file in sorted(PACKAGE.rglob("*.*")):
            if file != path and file.suffix != ".pyc":
                archive.write(file, Path("flash_ext", file.relative_to(PACKAGE)))
    make_hub.make(folder / "x.whl", folder / "hub")
    return folder / "hub"


def python(code: str, layout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code where nothing can be downloaded, and no flash_ext is to be found."""
    kept = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    kept |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return run_python("-c", code, layout, *arguments, cwd=layout, env=kept)


@pytest.mark.parametrize("targets", ["80+PTX;90a", "80+PTX,90a", "80+PTX 90a;"])
def test_targets_are_read_as_setup_reads_them(targets: str) -> None:
    assert make_hub.architectures(targets) == ["8.0+PTX", "9.0a"]


def test_the_layout(layout: Path) -> None:
    for name, backend in (("torch-cpu", "cpu"), (CUDA_VARIANT, "cuda")):
        variant = layout / "build" / name
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["name"] == "flash-ext" and metadata["backend"]["type"] == backend
        assert metadata["id"].isidentifier()
        files = {x.name for x in variant.iterdir()}
        assert files == {"__init__.py", "flash_ext", "metadata.json"}
        assert (variant / "flash_ext/_C.json").exists() == (backend == "cuda")
    assert metadata["backend"]["archs"] == ["8.0+PTX", "9.0a"]
    card = (layout / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nlibrary_name: kernels\n") and "flash-attn" in card


LOAD = """
import os, sys
from pathlib import Path

FA3 = "varunneal/flash-attention-3"
os.environ["LOCAL_KERNELS"] = f"{FA3}={sys.argv[1]}"
import torch
from kernels import get_kernel, get_local_kernel

hub = Path(sys.argv[1])
kernel = get_local_kernel(hub)
import flash_ext
assert Path(flash_ext.__file__).is_relative_to(hub) and flash_ext.attention is kernel.attention
q, k, v = torch.randn(3, 2, 9, 4, 64).unbind()
expected = flash_ext.reference.attention(q, k, v, causal=True)[0]
torch.testing.assert_close(kernel.flash_attn_func(q, k, v, causal=True), expected)
offsets = torch.arange(0, 27, 9, dtype=torch.int32)
packed = (x.flatten(0, 1) for x in (q, k, v))
out = kernel.flash_attn_varlen_func(*packed, offsets, offsets, 9, 9, causal=True)
torch.testing.assert_close(out, expected.flatten(0, 1))
out = kernel.flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=9, causal=True)
torch.testing.assert_close(out, expected[:, -1:])
fa3 = get_kernel(FA3, version=1).flash_attn_interface
assert fa3 is kernel.flash_attn_interface
torch.testing.assert_close(fa3.flash_attn_func(q, k, v, causal=True), expected)
print(kernel.__version__)
"""


@needs_kernels
def test_kernels_loads_it(layout: Path) -> None:
    done = python(LOAD, layout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [flash_ext.__version__]


TWICE = """
import runpy, sys, types
sys.modules["flash_ext"] = types.ModuleType("flash_ext")
sys.modules["flash_ext"].__version__ = "0.0.1"
sys.modules["flash_ext"].__file__ = "elsewhere"
runpy.run_path(sys.argv[1] + "/build/torch-cpu/__init__.py")
"""


def test_another_version_in_the_process_is_refused(layout: Path) -> None:
    done = python(TWICE, layout)
    assert "and flash_ext 0.0.1 is imported already, from elsewhere" in done.stderr


MODEL = """
import os, sys
from pathlib import Path

NAME = "somebody/flash-ext"
variants = {x.name: x for x in Path(sys.argv[1], "build").iterdir()}
os.environ["LOCAL_KERNELS"] = f"{NAME}={sys.argv[1]}"
import torch, transformers

torch.manual_seed(0)
sizes = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
    eos_token_id=None, initializer_range=0.3, sliding_window=5,
)
model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)).eval().bfloat16()
tokens = torch.randint(2, 40, (2, 12))
mask = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
greedy = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
found = {}
for name in (NAME, "fa_ext"):
    if name != NAME:  # after the kernel, whose flash_ext it uses
        from flash_ext.integrations import transformers as fa_ext

        assert Path(sys.modules["flash_ext"].__file__).is_relative_to(sys.argv[1])
        fa_ext.register()
    model.set_attn_implementation(name)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits[mask.bool()]
    generated = [
        model.generate(torch.tensor([x]), generation_config=greedy)[0, len(x):].tolist()
        for x in prompts
    ]
    found[name] = logits, generated
assert torch.equal(found[NAME][0], found["fa_ext"][0])
assert found[NAME][1] == found["fa_ext"][1]
if sys.argv[2] == "batched":
    model.set_attn_implementation(NAME)
    done = model.generate_batch(inputs=prompts, generation_config=greedy)
    assert [done[name].generated_tokens for name in sorted(done)] == found[NAME][1]
"""


@needs_kernels
@pytest.mark.parametrize("batching", ("plain", "batched"))
def test_transformers_runs_a_model_on_it(batching: str, layout: Path) -> None:
    """The same logits as with the attention implementation of this package, and the same tokens."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    if not transformers.utils.is_kernels_available():
        pytest.skip("this transformers wants another release of kernels")
    if batching == "batched":
        pytest.importorskip("psutil", reason="continuous batching on a CPU needs psutil")
    done = python(MODEL, layout, batching)
    assert done.returncode == 0, done.stderr
