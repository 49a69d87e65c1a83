"""Renders benchmarks/results, and only reads them: tables, figures, and documents with both."""
