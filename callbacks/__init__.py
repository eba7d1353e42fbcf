"""What watches a run."""

from callbacks.collapse import CollapseMonitor
from callbacks.feature_maps import FeatureMaps
from callbacks.predictions import PredictionFiles
from callbacks.provenance import RunRecord
from callbacks.results import Results
from callbacks.throughput import Throughput

__all__ = ["CollapseMonitor", "FeatureMaps", "PredictionFiles", "Results", "RunRecord", "Throughput"]
