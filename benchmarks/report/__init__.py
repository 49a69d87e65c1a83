"""Renders benchmarks/results: tables, figures, and the documents that show them.

The scripts in benchmarks/ measure and write result files; the modules here only read them. A module
has the name of the result file that it renders, where it renders one.
"""
