"""Build the wheel, install it into a new environment and run the README's quick start in an empty folder.

    python tools/wheel_test.py

The wheel stays in dist/. In the commands of the quick start, the wheel's path replaces the path `.` of the clone.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Writes the user's files that the quick start names: photos of three classes, and one more photo.
PHOTOS = """
import random
from pathlib import Path
from PIL import Image

for name, colour in dict(leaf=(60, 140, 60), sand=(200, 170, 110), sea=(50, 90, 160)).items():
    Path("photos", name).mkdir(parents=True)
    for i in range(20):
        noise = Image.effect_noise((96, 96), random.randint(20, 60)).convert("RGB")
        Image.blend(noise, Image.new("RGB", noise.size, colour), 0.6).save(f"photos/{name}/{i}.jpg")
Path("photos/sea/0.jpg").rename("photo.jpg")
"""


def quick_start() -> list[str]:
    """Return the shell commands of the README's section "Quick start"."""
    section = re.split(r"^## ", (ROOT / "README.md").read_text().split("\n## Quick start\n")[1], flags=re.M)[0]
    return re.findall(r"^((?:pip|vil|python) .*)$", section, re.M)


def run(command: str, folder: Path, environment: dict[str, str]) -> None:
    print(f"\n$ {command}", flush=True)
    subprocess.run(command, shell=True, check=True, cwd=folder, env=environment)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        (empty := Path(temporary, "empty")).mkdir()
        venv.create(Path(temporary, "venv"), with_pip=True)
        path = f"{Path(temporary, 'venv', 'bin')}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONPATH", None)
        run("rm -rf build dist && pip wheel --no-deps --wheel-dir dist .", ROOT, environment)
        (wheel,) = ROOT.glob("dist/*.whl")
        install, *commands = quick_start()
        run(re.sub(r'"\.(\[[\w,]+])"', rf'"{wheel}\1"', install), empty, environment)
        subprocess.run(["python", "-c", PHOTOS], check=True, cwd=empty, env=environment)
        for command in commands:
            run(command, empty, environment)
        print(f"\nThe quick start works with {wheel.relative_to(ROOT)}.")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failed:
        sys.exit(f"failed with status {failed.returncode}: {failed.cmd}")
