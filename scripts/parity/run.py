#!/usr/bin/env python3
"""Compares the engine with transformers. Needs python >= 3.10 and cargo; installs the rest into a folder of its own.

    python3 scripts/parity/run.py              compare live, with fresh random models
    python3 scripts/parity/run.py fixtures     write the fixtures of crates/agl-engine/tests anew
    python3 scripts/parity/run.py bench        training and decoding speed beside PyTorch
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIXTURES = ROOT / "crates" / "agl-engine" / "tests" / "fixtures"
REQUIREMENTS = HERE / "requirements.txt"


def environment():
    """The python of a virtual environment that holds exactly the pinned packages, made if it is not there."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    folder = Path(os.environ.get("AGL_PARITY_VENV", target / "parity-venv"))
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return python
    print(f"installing torch and transformers into {folder} (once; a few minutes)", flush=True)
    if shutil.which("uv"):
        subprocess.run(["uv", "venv", "--clear", "--python", sys.executable, folder], check=True)
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, "-r", REQUIREMENTS], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS], check=True)
    stamp.write_text(REQUIREMENTS.read_text())
    return python


def main(arguments):
    if sys.version_info < (3, 10):
        sys.exit(f"parity needs python 3.10 or newer, but this is {sys.version.split()[0]}; run it with a newer python3")
    if shutil.which("cargo") is None:
        sys.exit("parity needs cargo; install Rust from https://rustup.rs")
    scripts = {
        (): (HERE / "compare.py", [FIXTURES]),
        ("fixtures",): (HERE / "make_fixtures.py", [FIXTURES]),
        ("bench",): (ROOT / "benches" / "engine" / "compare.py", []),
    }
    if tuple(arguments) not in scripts:
        sys.exit(__doc__)
    script, parameters = scripts[tuple(arguments)]
    return subprocess.run([environment(), script, *parameters], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
