"""Draws the figures of docs/design and docs/walkthrough.md, and fills in the table of forward.md.

    python docs/figures/make.py

Numbers come from csrc/plan/tuning.h. The standard library is enough, and equal sources give equal
files.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTH = 800
SHARED_LIMIT = 227 * 1024

# Okabe and Ito's colours, which the colour-blind can tell apart; the pale ones are for areas.
BLUE, ORANGE, PURPLE, RED = "#0072b2", "#b06a00", "#a3467b", "#b84a00"
SKY, SAND, GREEN, PINK, YELLOW = "#a9dbf5", "#f7cf80", "#8fd6bf", "#e8bdd4", "#f7ef9a"
GREY, PALE, INK = "#c8c8c8", "#eeeeee", "#202020"


class Svg:
    """A drawing; texts that would leave it or their box are errors."""

    def __init__(self, name: str, height: int, title: str):
        self.name, self.height = name, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" font-family="DejaVu Sans, Verdana, sans-serif"'
            f' role="img"><title>{escape(title)}</title>',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        ]

    def text(self, x, y, text, size=13, anchor="start", fill=INK, bold=False):
        length = len(text) * size * (0.66 if bold else 0.6)
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        assert size >= 12 and left >= 0 and left + length <= WIDTH + 8, (self.name, text, left)
        assert 0 < y <= self.height, (self.name, text, y)
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
            f' fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def rect(self, x, y, w, h, fill, stroke=INK, width=1.0):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"'
            f' stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def box(self, x, y, w, h, lines, fill, size=12):
        lines = [lines] if isinstance(lines, str) else lines
        self.rect(x, y, w, h, fill)
        for i, line in enumerate(lines):
            assert len(line) * size * 0.56 <= w, (self.name, line, w)
            middle = y + h / 2 + (i - (len(lines) - 1) / 2) * (size + 3)
            self.text(x + w / 2, middle + size * 0.36, line, size, "middle")

    def line(self, x1, y1, x2, y2, stroke=INK, width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}"'
            f' stroke-width="{width:g}"{dashes}/>'
        )

    def arrow(self, x1, y1, x2, y2, stroke=INK, dash="", width=2.0):
        self.line(x1, y1, x2, y2, stroke, width, dash)
        dx, dy = x2 - x1, y2 - y1
        length = (dx * dx + dy * dy) ** 0.5
        dx, dy = 8 * dx / length, 8 * dy / length
        points = [
            (x2, y2),
            (x2 - dx - dy / 2, y2 - dy + dx / 2),
            (x2 - dx + dy / 2, y2 - dy - dx / 2),
        ]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{joined}" fill="{stroke}"/>')

    def dot(self, x, y, fill):
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{fill}"/>')

    def write(self):
        (HERE / f"{self.name}.svg").write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def tunings():
    """(name, d, dv, consumers, block_kv, q, k, v stages, ping_pong) as in csrc/plan/tuning.h."""
    source = (ROOT / "csrc/plan/tuning.h").read_text()
    table = source.split("kFa3Forward[] = {")[1].split("\n};\n")[0]
    uses = {
        "usual": "usual",
        "small_q": "small Q",
        "long_keys": "long keys",
    }
    defaults = {"consumers": "2", "q_stages": "2", "ping_pong": "false"}
    numbers = ("consumers", "block_kv", "q_stages", "k_stages", "v_stages")
    found = []
    for row in table.split(".head_dims = ")[1:]:
        d, dv = map(int, re.match(r"\{(\d+), (\d+)\}", row).groups())
        tiles = re.findall(r"\.(\w+) =\s+\{(\.(?:consumers|block_kv)[^}]*)\}", row)
        for use, fields in tiles:
            tile = defaults | dict(re.findall(r"\.(\w+) = (\w+)", fields))
            name = f"{d}" if d == dv else f"{d} / {dv}"
            name += f", {uses[use]}" if len(tiles) > 1 else ""
            found.append((name, d, dv, *(int(tile[x]) for x in numbers), tile["ping_pong"]))
    return found


def shared_memory(tuning):
    """Stages of (letter, count, bytes), as Fa3ForwardTiles lays them out."""
    _, d, dv, consumers, block_kv, q, k, v, _ = tuning
    buffers = [
        ("Q", q, consumers * 64 * d * 2),
        ("K", k, block_kv * d * 2),
        ("V", v, block_kv * dv * 2),
        ("tiles", 4, 64),
        ("barriers", q + k + v + 4, 16),
    ]
    assert sum(n * size for _, n, size in buffers) <= SHARED_LIMIT
    return buffers


def registers(tuning):
    """Registers a lane for S, P, P' (not with four consumers), O, and the limit of a consumer."""
    _, _, dv, consumers, block_kv, *_ = tuning
    p = block_kv // 4
    return [block_kv // 2, p, p * (consumers < 4), dv // 2], {2: 232, 3: 160, 4: 112}[consumers]


def draw_roles():
    svg = Svg("roles", 866, "Who signals whom in the FA3 forward")
    lanes = dict(K=85, Q=225, V=365, C0=540, C1=710)
    heads = {
        "K": ["K's producer", "warp 0, lane 0"],
        "Q": ["Q's producer", "warp 3, lane 0"],
        "V": ["V's producer", "warp 2, lane 0"],
        "C0": ["consumer 0", "warps 4-7"],
        "C1": ["consumer 1", "warps 8-11"],
    }
    for name, x in lanes.items():
        svg.line(x, 60, x, 824, GREY, 2)
        svg.box(x - 64, 14, 128, 44, heads[name], SAND if len(name) == 1 else SKY, 13)

    def signal(y, sources, targets, label, at, kind="full"):
        color, dash = {"full": (BLUE, ""), "empty": (ORANGE, "7 4"), "next": (PURPLE, "2 4")}[kind]
        start = lanes[sources[0]]
        for target in targets:
            svg.arrow(start, y, lanes[target], y, color, dash)
        for source in sources:
            svg.dot(lanes[source], y, color)
        svg.text(at, y - 6, label, 12, "middle", color)

    def action(y, name, lines, fill=PALE, width=128, height=24):
        svg.box(lanes[name] - width / 2, y, width, height, lines, fill)

    consumers = ["C0", "C1"]
    action(72, "K", "fetch a Q tile")
    signal(124, ["K"], ["Q", "V", *consumers], "full(tiles)", 452)
    signal(150, ["Q"], ["K"], "empty(tiles)", 155, "empty")
    signal(172, ["V"], ["K"], "empty(tiles)", 295, "empty")
    action(186, "K", "load K of tile 2")
    action(186, "Q", "load Q")
    action(186, "V", "load V of tile 2")
    signal(240, ["Q"], consumers, "full(Q): all bytes are there", 452)
    signal(266, ["K"], consumers, "full(K)", 155)
    action(280, "C0", "S = Q K\u2082\u1d40", SKY)
    signal(326, ["C0"], ["C1"], "ping-pong", 625, "next")
    action(338, "C1", "S = Q K\u2082\u1d40", SKY)
    signal(390, ["C1", "C0"], ["K"], "empty(K)", 452, "empty")
    action(400, "K", "K of tile 1, 0, ...")
    action(400, "C0", "P = softmax(S)", GREEN)
    action(400, "C1", "P = softmax(S)", GREEN)
    signal(452, ["K"], consumers, "full(K)", 155)
    signal(476, ["V"], consumers, "full(V)", 452)
    action(488, "C0", ["S' = Q K\u2081\u1d40", "O += P V\u2082"], SKY, height=40)
    signal(550, ["C0"], ["C1"], "ping-pong", 625, "next")
    action(562, "C1", ["S' = Q K\u2081\u1d40", "O += P V\u2082"], SKY, height=40)
    signal(628, ["C1", "C0"], ["K"], "empty(K): S' is there", 452, "empty")
    action(640, "C0", "P' = softmax(S')", GREEN)
    action(640, "C1", "P' = softmax(S')", GREEN)
    signal(690, ["C1", "C0"], ["V"], "empty(V): P V is done", 452, "empty")
    svg.rect(490, 702, 270, 16, "white", "white")
    svg.text(625, 714, "... until all S of the tile are there:", 12, "middle")
    signal(736, ["C1", "C0"], ["Q"], "empty(Q)", 452, "empty")
    svg.rect(504, 748, 242, 16, "white", "white")
    svg.text(625, 760, "... in the next tile's first step:", 12, "middle")
    action(770, "C0", "store O / l", YELLOW)
    action(770, "C1", "store O / l", YELLOW)
    signal(816, ["C1", "C0"], ["K"], "empty(tiles)", 452, "empty")
    for x, color, dash, label in [
        (30, BLUE, "", "full: TMA's bytes, or the tile is written"),
        (390, ORANGE, "7 4", "empty: one arrival a warp"),
        (620, PURPLE, "2 4", "ping-pong"),
    ]:
        svg.arrow(x, 848, x + 34, 848, color, dash)
        svg.text(x + 42, 852, label, 12, fill=color)
    svg.write()


def draw_step():
    svg = Svg("step", 344, "A consumer's steps, over the end of a Q tile")
    left, step = 88, 177
    names = [
        ("A1", "A2", "rescale"),
        ("A0", "A1", "rescale"),
        ("B2", "A0", "rescale"),
        ("B1", "B2", "store A"),
    ]
    rows = {"tensor": 92, "cuda": 176}
    svg.text(8, 30, "step", 12, bold=True)
    for y, label in [
        (rows["tensor"] + 14, "tensor"),
        (rows["tensor"] + 30, "cores"),
        (rows["cuda"] + 14, "this one's"),
        (rows["cuda"] + 30, "threads"),
    ]:
        svg.text(8, y, label, 12)
    for i, (scores, product, settle) in enumerate(names):
        x = left + i * step
        svg.line(x, 14, x, 246, GREY, 1, "4 3")
        svg.text(x + step / 2, 30, ["within A", "within A", "A to B", "within B"][i], 12, "middle")
        svg.text(x + step / 2, 48, ["steady", "steady", "last of A", "first of B"][i], 12, "middle")
        svg.box(x + 3, rows["tensor"], 60, 44, ["S", scores], SKY)
        svg.box(x + 64, rows["tensor"], 44, 44, ["P V", product], SAND)
        svg.box(x + 109, rows["tensor"], 66, 44, ["the", "other's"], PALE)
        svg.box(x + 3, rows["cuda"], 60, 24, settle, YELLOW)
        svg.box(x + 64, rows["cuda"], 102, 24, f"softmax: P {scores}", GREEN)
        for offset, letter in [(3, "a"), (64, "b, c"), (167, "d")]:
            svg.line(x + offset, rows["cuda"] + 26, x + offset, 220, INK, 1)
            svg.text(x + offset, 234, letter, 13, "middle", bold=True)
    svg.line(left + 4 * step, 14, left + 4 * step, 246, GREY, 1, "4 3")
    legend = [
        "a: wait for full(K); start S' = Q K\u1d40; settle O (rescale, or store the last tile)",
        "b: wait for full(V); start P V",
        "c: wait for S' alone (wgmma_wait<1>); release K; ask for the next K and V; softmax",
        "d: wait for P V (wgmma_wait<0>); release V",
    ]
    for i, line in enumerate(legend):
        svg.text(8, 268 + 20 * i, line, 12)
    svg.write()


def draw_shared_memory():
    bottom = 40 + 38 * len(tunings())
    svg = Svg("shared_memory", bottom + 44, "Shared memory of the FA3 forward by head dim")
    left, scale = 185, 590 / SHARED_LIMIT
    svg.text(8, 24, "d", 13, bold=True)
    colors = {"Q": SKY, "K": SAND, "V": GREEN}
    for row, tuning in enumerate(tunings()):
        y = 40 + row * 38
        svg.text(8, y + 19, tuning[0], 12)
        x = float(left)
        for letter, count, size in shared_memory(tuning)[:3]:
            for stage in range(count):
                svg.box(
                    x,
                    y,
                    size * scale,
                    28,
                    f"{letter}{stage}" if size > 5120 else letter,
                    colors[letter],
                )
                x += size * scale
        svg.rect(x, y, 2, 28, INK)
    limit = left + SHARED_LIMIT * scale
    svg.line(limit, 14, limit, bottom + 8, RED, 2, "6 3")
    svg.text(limit - 6, 24, "227 KB", 12, "end", RED)
    svg.text(left, 24, "one stage of a pipeline each; the black rim: work tiles and barriers", 12)
    for kb in (0, 50, 100, 150, 200):
        x = left + kb * 1024 * scale
        svg.line(x, bottom, x, bottom + 6)
        svg.text(x, bottom + 22, f"{kb} KB", 12, "middle")
    svg.write()


def draw_registers():
    bottom = 40 + 38 * len(tunings())
    svg = Svg("registers", bottom + 44, "Registers of a consumer's lane by head dim")
    left, scale = 185, 590 / 240
    svg.text(8, 24, "d", 13, bold=True)
    svg.text(left, 24, "32-bit registers of one lane; right of the line there are none", 12)
    for row, tuning in enumerate(tunings()):
        y = 40 + row * 38
        counts, limit = registers(tuning)
        svg.text(8, y + 19, tuning[0], 12)
        x = float(left)
        labels = zip(("S", "P", "P'", "O"), counts, (SKY, SAND, PINK, GREEN), strict=True)
        for name, count, color in labels:
            if count == 0:
                continue
            svg.box(x, y, count * scale, 28, f"{name} {count}", color)
            x += count * scale
        rest = left + limit * scale - x
        svg.box(x, y, rest, 28, f"{limit - sum(counts)} left", PALE)
        svg.line(left + limit * scale, y - 4, left + limit * scale, y + 32, RED, 3)
    for count in (0, 40, 80, 120, 160, 200, 232):
        x = left + count * scale
        svg.line(x, bottom, x, bottom + 6)
        svg.text(x, bottom + 22, str(count), 12, "middle")
    svg.write()


def draw_fragment():
    svg = Svg("fragment", 470, "The accumulator fragment of wgmma, and the A operand")
    left, top, w, h = 70, 64, 44, 22
    colors = [[SKY, SAND], [GREEN, PINK]]
    svg.text(
        left + 4 * w,
        24,
        "16 rows of one warp, 16 columns (one k step of P V)",
        13,
        "middle",
        bold=True,
    )
    for pair in range(8):
        svg.text(left + pair * w + w / 2, 52, f"{2 * pair},{2 * pair + 1}", 12, "middle")
    svg.text(left - 8, 52, "column", 12, "end")
    for row in range(16):
        svg.text(
            left - 8, top + row * h + 16, f"row {row}" if row % 4 == 0 else str(row), 12, "end"
        )
        for pair in range(8):
            lane = row % 8 * 4 + pair % 4
            svg.box(left + pair * w, top + row * h, w, h, str(lane), colors[row // 8][pair // 4])
    svg.text(left, top + 16 * h + 20, "in the cells: the lane that holds both columns", 12)
    x = left + 8 * w + 26
    svg.text(x, 52, "S: v[0][n][...]", 12, bold=True)
    svg.text(x + 188, 52, "P: v[k][j]", 12, bold=True)
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    for j, (half, side) in enumerate(order):
        y = 64 + j * 44
        n = "2k" if side == 0 else "2k+1"
        svg.box(x, y, 160, 34, f"v[{n}][{2 * half}], v[{n}][{2 * half + 1}]", colors[half][side])
        svg.arrow(x + 164, y + 17, x + 184, y + 17)
        svg.box(x + 188, y, 90, 34, f"v[k][{j}]", colors[half][side])
    notes = [
        "Two fp32 registers are rounded and",
        "packed into one of 16-bit halves,",
        "by the lane that has them already.",
        "",
        "Register v[0][n][2i + e] of a lane is",
        "row    16 warp + lane / 4 + 8 i",
        "column 8 n + 2 (lane % 4) + e",
        "of the warpgroup's 64 rows.",
    ]
    for i, line in enumerate(notes):
        svg.text(x, 262 + 20 * i, line, 12)
    svg.write()


def draw_swizzle():
    svg = Svg("swizzle", 330, "Where the 16-byte chunks of a row lie")
    for left, chunks, title, xor, pitch in [
        (60, 8, "128-byte swizzle: atoms of 64 columns", lambda r: r & 7, 128),
        (530, 4, "64-byte swizzle (d 32, d 96)", lambda r: (r >> 1) & 3, 64),
    ]:
        w, h, top = 50, 26, 64
        svg.text(left, 24, title, 13, bold=True)
        for place in range(chunks):
            svg.text(left + place * w + w / 2, 52, f"+{16 * place}", 12, "middle")
        for row in range(8):
            svg.text(left - 8, top + row * h + 17, f"row {row}", 12, "end")
            for place in range(chunks):
                chunk = place ^ xor(row)
                fill = [SKY, SAND][chunk] if chunk < 2 else "white"
                svg.box(left + place * w, top + row * h, w, h, str(chunk), fill, 13)
        svg.text(left, top + 8 * h + 20, f"{pitch} bytes a row; repeats after 8 rows", 12)
    svg.text(
        12,
        318,
        "In the cells: chunk c, columns 8c to 8c + 7. Coloured: what the first k step"
        " of a K-major operand reads.",
        12,
    )
    svg.write()


def draw_descriptor():
    svg = Svg("descriptor", 400, "How descriptors walk over a tile")
    top, h, w = 96, 25, 130
    for left, title, sub in [
        (56, "KMajor", "stored [m or n][k]; Q and K of Q K\u1d40"),
        (450, "MNMajor", "stored [k][n]; V of P V"),
    ]:
        major = left < 400
        svg.text(left, 24, title, 13, bold=True)
        svg.text(left, 44, sub, 12)
        for atom in range(2):
            x = left + atom * (w + 16)
            svg.text(x + w / 2, 70, "64 columns", 12, "middle")
            svg.text(x + w / 2, 87, f"of {'k' if major else 'n'}", 12, "middle")
            for group in range(8):
                svg.rect(x, top + group * h, w, h, "white", GREY)
            if major:
                for k in range(4):
                    fill = [SKY, SAND, "white", "white"][k] if atom == 0 else "white"
                    svg.rect(x + k * w / 4, top, w / 4, 8 * h, fill)
                    svg.text(
                        x + (k + 0.5) * w / 4, top + 4 * h + 5, str(4 * atom + k), 13, "middle"
                    )
            else:
                for k in range(4):
                    fill = [SKY, SAND, "white", "white"][k]
                    svg.rect(x, top + 2 * k * h, w, 2 * h, fill)
                    svg.text(x + w / 2, top + (2 * k + 1) * h + 5, str(k), 13, "middle")
        for group in range(1, 8):
            svg.line(left, top + group * h, left + w, top + group * h, GREY, 1, "3 3")
        svg.text(left - 8, top + 17, "8", 12, "end")
        svg.text(left - 8, top + 32, "rows", 12, "end")
        y = top + 8 * h
        notes = [
            [
                "k step: + 32 bytes (+2); next atom:",
                "+ rows x 128 bytes",
                "8 rows on: 1,024 bytes",
            ],
            [
                "k step: 16 rows, + 2,048 bytes (+128)",
                "next atom along n: rows x 128 bytes",
                "8 rows on: 1,024 bytes",
            ],
        ][0 if major else 1]
        for i, line in enumerate(notes):
            svg.text(left, y + 26 + 20 * i, line, 12)
    svg.text(
        12,
        388,
        "Numbers: the k step that reads the place. Coloured: k steps 0 and 1. Steps in"
        " brackets: units of 16 bytes.",
        12,
    )
    svg.write()


def draw_tensor_map():
    svg = Svg("tensor_map", 420, "One tensor map for all sequences")
    top, h = 88, 24
    svg.text(20, 28, "memory", 13, bold=True)
    svg.text(250, 28, "tile of 8 rows, sequence 0", 13, bold=True)
    svg.text(520, 28, "tile of 8 rows, sequence 1", 13, bold=True)
    svg.text(20, 50, "rows of one head", 12)
    svg.text(250, 50, "begin 0, n 5", 12)
    svg.text(520, 50, "begin 5, n 3", 12)
    for x, label in [(250, "coordinate"), (380, "arrives"), (520, "coordinate"), (650, "arrives")]:
        svg.text(x, 76, label, 12)
    owners = [0] * 5 + [1] * 3 + [2] * 5
    for row, owner in enumerate(owners):
        y = top + row * h
        svg.box(20, y, 190, h, f"row {row}: sequence {owner}", [SKY, SAND, GREEN][owner])
    for left, begin, n, fill in [(250, 0, 5, SKY), (520, 5, 3, SAND)]:
        for i in range(8):
            y = top + (begin + i) * h
            inside = i < n
            place = f"R - {n - i}" if inside else (f"R + {i - n}" if i > n else "R")
            svg.box(left, y, 100, h, place, fill if inside else PALE)
            svg.box(
                left + 100,
                y,
                130,
                h,
                f"row {begin + i}" if inside else "zeros",
                fill if inside else PALE,
            )
        y = top + (begin + n) * h
        svg.line(left - 14, y, left + 244, y, RED, 3)
    svg.text(250, 300, "red: the map's bound,", 12, fill=RED)
    svg.text(250, 318, "R = 2^30, for both", 12, fill=RED)
    svg.write()


def tables():
    rows = [
        "| d | rows x keys | Q | K | V | work tiles | barriers | all | of 232,448 |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for tuning in tunings():
        buffers = shared_memory(tuning)
        cells = [f"{n} x {size:,}" for _, n, size in buffers]
        total = sum(n * size for _, n, size in buffers)
        share = f"{100 * total / SHARED_LIMIT:.0f} %"
        tile = f"{tuning[3] * 64} x {tuning[4]}"
        rows.append(f"| {tuning[0]} | {tile} | {' | '.join(cells)} | {total:,} | {share} |")
    return "\n".join(rows)


def fill_in_tables():
    page = HERE.parent / "design/forward.md"
    marks = r"(<!-- generated:shared_memory begin -->\n).*?(<!-- generated:shared_memory end -->)"
    text, found = re.subn(
        marks, lambda m: f"{m[1]}{tables()}\n{m[2]}", page.read_text(), flags=re.S
    )
    assert found == 1
    page.write_text(text)


def draw_passes():
    """Each arrow is a pass of a whole matrix between HBM and the chip."""
    svg = Svg("passes", 330, "Passes over memory of three forms of attention")
    columns = {
        "standard attention": [
            ("Q, K", "S = Q K\u1d40", "S"),
            ("S", "row maximum m", ""),
            ("S", "row sum of exp(S - m)", ""),
            ("S", "P = exp(S - m) / sum", "P"),
            ("P, V", "O = P V", "O"),
        ],
        "online softmax": [
            ("Q, K", "S = Q K\u1d40", "S"),
            ("S", "m and sum, together", ""),
            ("S", "P = exp(S - m) / sum", "P"),
            ("P, V", "O = P V", "O"),
        ],
        "FlashAttention": [("Q, K, V", "S, m, sum and O by tiles", "O")],
    }
    for i, (name, passes) in enumerate(columns.items()):
        x = 6 + i * 265
        svg.text(x + 128, 22, name, 14, "middle", bold=True)
        for j, (read, work, written) in enumerate(passes):
            y = 40 + j * 57
            svg.text(x + 66, y + 17, read, 12, "end")
            svg.arrow(x + 4, y + 24, x + 66, y + 24, BLUE)
            svg.box(x + 70, y, 182, 24, work, GREEN)
            if written:
                svg.arrow(x + 66, y + 36, x + 4, y + 36, ORANGE)
                svg.text(x + 72, y + 41, f"{written}", 12)
    svg.arrow(560, 180, 622, 180, BLUE)
    svg.text(632, 184, "read from HBM", 13)
    svg.arrow(622, 206, 560, 206, ORANGE)
    svg.text(632, 210, "written to HBM", 13)
    svg.box(560, 226, 62, 24, "", GREEN)
    svg.text(632, 243, "on the chip", 13)
    svg.write()


def draw_loops():
    """The order in which the tiles of S are visited, and what moves at each."""
    svg = Svg("loops", 372, "Loop orders of FlashAttention-1 and 2")
    size, tiles = 44, 4

    def panel(x, title, by_columns, moves):
        svg.text(x + 180, 22, title, 14, "middle", bold=True)
        left, top = x + 110, 74
        svg.text(left + tiles * size / 2, 44, "K, V tiles", 12, "middle")
        svg.text(left - 34, top + tiles * size / 2 + 4, "Q, O tiles", 12, "end")
        for i in range(tiles):
            svg.box(left + i * size + 4, 50, size - 8, 18, "", SAND)
            svg.box(left - 28, top + i * size + 6, 22, size - 12, "", SKY)
            for j in range(tiles):
                order = j * tiles + i + 1 if by_columns else i * tiles + j + 1
                svg.box(left + j * size, top + i * size, size, size, str(order), PALE, 13)
        for j in range(tiles):
            at, end = j * size + size - 9, tiles * size - 6
            if by_columns:
                svg.arrow(left + at, top + 6, left + at, top + end, PURPLE)
            else:
                svg.arrow(left + 6, top + at, left + end, top + at, PURPLE)
        for n, line in enumerate(moves):
            svg.text(x + 8, 276 + 22 * n, line, 12)

    panel(0, "FlashAttention-1", True, [
        "outer loop: a tile of K and V is loaded once",
        "inner loop: Q, O, m and l of each Q tile come",
        "in, and O, m and l go out, at every visit",
        "one CTA does all of a head",
    ])  # fmt: skip
    panel(404, "FlashAttention-2", False, [
        "outer loop: Q once; O, m and l in registers",
        "inner loop: every tile of K and V comes in",
        "O goes out once, at the end of a row",
        "rows are independent: a CTA for each",
    ])  # fmt: skip
    svg.write()


def draw_warps():
    """Which warp owns which part of a tile of S, and what is exchanged."""
    svg = Svg("warps", 300, "Split-K and split-Q")
    fills = [SKY, SAND, GREEN, PINK]

    def panel(x, title, split_k, below):
        svg.text(x + 180, 22, title, 14, "middle", bold=True)
        for w, fill in enumerate(fills):
            if split_k:
                svg.box(x + 110 + 44 * w, 48, 40, 30, f"K {w}", fill)
                svg.box(x + 110 + 44 * w, 88, 40, 120, f"S {w}", fill)
                svg.box(x + 300, 88 + 30 * w, 50, 28, f"V {w}", fill)
            else:
                svg.box(x + 50, 88 + 30 * w, 50, 28, f"Q {w}", fill)
                svg.box(x + 110, 88 + 30 * w, 172, 28, f"S {w}", fill)
        if split_k:
            svg.box(x + 50, 88, 50, 120, "Q", PALE)
        else:
            svg.box(x + 110, 48, 172, 30, "K", PALE)
            svg.box(x + 300, 88, 50, 120, "V", PALE)
        for n, line in enumerate(below):
            svg.text(x + 8, 236 + 22 * n, line, 12)

    panel(0, "split-K: FlashAttention-1", True, [
        "a row of S lies in four warps: maxima, sums and",
        "four partial products S V of the whole tile",
        "are exchanged through shared memory",
    ])  # fmt: skip
    panel(404, "split-Q: FlashAttention-2", False, [
        "a row of S lies in one warp, from its maximum",
        "to its row of O: nothing is exchanged;",
        "all warps read the same K and V",
    ])  # fmt: skip
    svg.write()


def main():
    draw_passes()
    draw_loops()
    draw_warps()
    draw_roles()
    draw_step()
    draw_shared_memory()
    draw_registers()
    draw_fragment()
    draw_swizzle()
    draw_descriptor()
    draw_tensor_map()
    fill_in_tables()


if __name__ == "__main__":
    main()
