"""WebDataset shards, which may come from anybody: timm's reader of them in webdataset's secure mode."""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from typing import Any

import webdataset
from PIL import Image
from timm.data.readers.reader_wds import ReaderWds
from webdataset.filters import getfirst
from webdataset.gopen import gopen_schemes

from ..config import ConfigError
from .images import UNREADABLE, Unreadable, read_image

LOCAL = "local-shards"  # scheme of the files that webdataset may open
NUMBERS = 2**20


class Shards(ReaderWds):
    """timm's reader, but what a sample holds is read as any image file, and a local folder holds its own shards alone.

    A sample that cannot be read is named and counted in `unreadable`. Training goes on with the next one; evaluation
    gets a blank image with the target `UNREADABLE`.
    """

    def __init__(self, root: str | None, **kwargs):
        if not root:
            raise ConfigError("data_dir is not given: the folder or address of the shards")
        for name in (root, kwargs["split"]):
            if re.match(r"\W*pipe:", name, re.IGNORECASE):
                raise ConfigError(f"{name!r} is a command, which is not run: data_dir takes a folder or an address")
        enter_secure_mode()
        super().__init__(root if "://" in root else f"{LOCAL}:{os.path.abspath(root)}", **kwargs)
        self.unreadable = Unreadable(NUMBERS)

    def _lazy_init(self) -> None:
        enter_secure_mode()  # in a loader's process
        super()._lazy_init()
        shards: Any = self.ds
        shards.pipeline[-2:] = [webdataset.map(self._read)]  # in place of timm's decoding and naming

    def _read(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        label = self.split_info.alt_label
        try:
            target = int(json.loads(sample["json"])[label] if label else sample["cls"])
            if target < 0:  # timm's mark of a sample without a label
                return None
            image = read_image(io.BytesIO(getfirst(sample, self.input_key)))
            return dict(image=image, target=target)
        except Exception as error:
            name = f"{sample.get('__url__', '').removeprefix(f'{LOCAL}:')}: {sample.get('__key__')}"
            self.unreadable.add(zlib.crc32(name.encode()) % NUMBERS, name, error)
            return None if self.is_training else dict(image=Image.new("RGB", (256, 256)), target=UNREADABLE)


def enter_secure_mode() -> None:
    """Has webdataset refuse commands, pickles and files, which leaves it those of `Shards`."""
    webdataset.utils.enforce_security = True
    gopen_schemes.pop("pipe", None)  # webdataset before 1.0 has no such mode
    gopen_schemes[LOCAL] = _open_local


def _open_local(url: str, mode: str = "rb", *_, **__):
    return open(url.removeprefix(f"{LOCAL}:"), mode)
