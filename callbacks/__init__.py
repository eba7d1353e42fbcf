"""What watches a run."""

from callbacks.checkpoint_files import AtomicCheckpointIO
from callbacks.checkpoints import Checkpoints
from callbacks.collapse import CollapseMonitor
from callbacks.crash_report import CrashReport
from callbacks.dense_pictures import DensePictures
from callbacks.feature_maps import FeatureMaps
from callbacks.gradient_norm import GradientNorm
from callbacks.predictions import PredictionFiles
from callbacks.progress import Progress
from callbacks.provenance import RunRecord
from callbacks.results import Results
from callbacks.step_seed import StepSeed
from callbacks.throughput import Throughput

__all__ = [
    "AtomicCheckpointIO",
    "Checkpoints",
    "CollapseMonitor",
    "CrashReport",
    "DensePictures",
    "FeatureMaps",
    "GradientNorm",
    "PredictionFiles",
    "Progress",
    "Results",
    "RunRecord",
    "StepSeed",
    "Throughput",
]
