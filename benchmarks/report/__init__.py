"""Renders benchmarks/results: tables, figures, and the documents that show them.

The scripts in benchmarks/ measure and record; the modules here only read.
"""
