"""Not the package, which is vil/ in here: Python takes a clone called vil for it where a script lies beside it."""

from pathlib import Path

if __name__ == "vil":
    raise ImportError(
        f"{Path(__file__).parent} is a clone of Vision Longhorn, and hides the package vil from what runs beside it: "
        "give the clone another name"
    )
