"""Check before a download of pretrained weights that the Hugging Face Hub can be reached."""

from __future__ import annotations

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import HfHubHTTPError

from .errors import ConfigError
from .text import one_line

FILES = ("model.safetensors", "pytorch_model.bin")  # file names of weights, in the order in which timm tries them


def check_download(model: str, repository: str, remedy: str) -> None:
    """Check that the weights of a model are cached, or that the Hugging Face Hub can be reached.

    Without this check, `huggingface_hub` retries each of the two files for 23 seconds.

    Args:
        model: Model name in timm, for the error message.
        repository: Repository of the weights on the hub, such as "timm/resnet18.a1_in1k".
        remedy: How to use other weights, for the error message.

    Raises:
        ConfigError: The weights are not cached, and the hub cannot be reached.
    """
    if any(isinstance(try_to_load_from_cache(repository, name), str) for name in FILES):
        return
    try:
        get_hf_file_metadata(hf_hub_url(repository, FILES[0]))  # a single request, which is not retried
    except HfHubHTTPError:  # the hub can be reached, so timm tries the other file or reports the error
        return
    except Exception as error:  # the types of network errors depend on the version of huggingface_hub
        raise ConfigError(
            f"cannot download the pretrained weights of {model} from the Hugging Face Hub "
            f"({one_line(error, 300)}): check the network connection, or {remedy}"
        ) from error
