#!/usr/bin/env python3
"""Compares the engine with transformers, and with verl's published functions for advantages and losses. Needs python >= 3.10
and cargo; installs the rest into a folder of its own.

    python3 scripts/parity/run.py              compare live, with fresh random models
    python3 scripts/parity/run.py fixtures     write the fixtures of crates/agl-engine/tests and crates/agl-core/tests anew
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
CREDIT_FIXTURES = ROOT / "crates" / "agl-core" / "tests" / "fixtures"
REQUIREMENTS = HERE / "requirements.txt"
# Without what it requires (Ray and more): published.py needs a few of its functions.
VERL = "verl==0.9.1"


def environment():
    """The python of a virtual environment that holds exactly the pinned packages, made if it is not there."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    folder = Path(os.environ.get("AGL_PARITY_VENV", target / "parity-venv"))
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = REQUIREMENTS.read_text() + VERL
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing torch and transformers into {folder} (once; a few minutes)", flush=True)
    if shutil.which("uv"):
        subprocess.run(["uv", "venv", "--clear", "--python", sys.executable, folder], check=True)
        install = ["uv", "pip", "install", "--quiet", "--python", python]
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "-r", REQUIREMENTS], check=True)
    subprocess.run([*install, "--no-deps", VERL], check=True)
    stamp.write_text(wanted)
    return python


def main(arguments):
    if sys.version_info < (3, 10):
        sys.exit(f"parity needs python 3.10 or newer, but this is {sys.version.split()[0]}; run it with a newer python3")
    if shutil.which("cargo") is None:
        sys.exit("parity needs cargo; install Rust from https://rustup.rs")
    scripts = {
        (): (HERE / "compare.py", [FIXTURES, CREDIT_FIXTURES]),
        ("fixtures",): (HERE / "make_fixtures.py", [FIXTURES, CREDIT_FIXTURES]),
        ("bench",): (ROOT / "benches" / "engine" / "compare.py", []),
    }
    if tuple(arguments) not in scripts:
        sys.exit(__doc__)
    script, parameters = scripts[tuple(arguments)]
    return subprocess.run([environment(), script, *parameters], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
