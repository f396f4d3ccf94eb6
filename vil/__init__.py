"""Vision Longhorn: image backbones with a linear-time recurrence. `import vil` registers its models with timm."""

from .factory import from_checkpoint
from .predict import predict
from .vision_longhorn import VisionLonghorn

__all__ = ["VisionLonghorn", "from_checkpoint", "predict"]
