"""benchmarks/io.py as a module: by its name it would be the standard library's io."""

from __future__ import annotations

import importlib.util
import sys

import gpu_test_report

spec = importlib.util.spec_from_file_location(
    "benchmark_io", gpu_test_report.common.ROOT / "benchmarks" / "io.py"
)
benchmark_io = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark_io  # dataclasses look their module up there
spec.loader.exec_module(benchmark_io)
