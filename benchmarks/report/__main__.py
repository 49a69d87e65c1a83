"""Writes the measured tables and figures of README and docs from benchmarks/results.

    make report                  # rewrite them
    make report ARGS=--check     # exit 1 if one differs from what would be written

No number is typed. Tables stand between <!-- generated:results begin --> and <!-- generated:results
end -->, and the same with the other names of documents.py; figures are figures.py's. CPU support
is asked of the package here and now; GPU support comes from support.json, where the same questions
were asked on the GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import common

from . import figures
from .documents import outdated
from .tables import gpu_folders


def main() -> int:
    """Rewrite or check the documents and figures."""
    parser = common.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    parser.add_argument("--root", type=Path, default=common.ROOT, help="of README.md and docs/")
    args = parser.parse_args()
    digest = common.source_digest()
    for path in sorted(common.RESULTS.glob("*/*.json")):
        found = (common.read_json(path) or {}).get("digest")
        if found not in (digest, None):  # what is recorded of others has none
            print(f"note: {path.relative_to(common.RESULTS)} is of source {found}, not of {digest}",
                  file=sys.stderr)  # fmt: skip
    gpus = [folder.name for folder in gpu_folders()]
    old = [f"docs/figures/{gpu}/{name}.svg" for gpu in gpus for name in figures.stale(gpu)]
    documents = outdated(args.root)
    if args.check:
        for name in [*old, *(path.name for path in documents)]:
            print(f"{name} is not up to date: run make report")
        return int(bool(old or documents))
    for path, text in documents.items():
        path.write_text(text)
    if old:
        for gpu in gpus:
            figures.write(gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
