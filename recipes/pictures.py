"""Writes a job with images for series-c.sh: pictures of one colour, rows that ask for it, and a tiny Qwen2-VL.

    python recipes/pictures.py FOLDER EDGE

FOLDER gets train.jsonl, validation.jsonl, their images of EDGE by EDGE pixels, and in `model` a random model with its
processor. One row in five has no image.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import vision
from PIL import Image

SIZES = {"train": range(400), "validation": range(400, 440)}


def main(folder: Path, edge: int) -> None:
    if (folder / "validation.jsonl").exists():
        return
    vision.make(folder / "model", "qwen2_vl")
    for split, examples in SIZES.items():
        rows = []
        for example in examples:
            name = list(vision.COLOURS)[example % len(vision.COLOURS)]
            row = {"prompt": f"What is this {name} {example}?", "completion": f"It is {name}"}
            if example % 5:
                image = Image.new("RGB", (edge, edge), vision.COLOURS[name])
                image.putpixel((example % edge, 3), (example % 256, 0, 0))
                vision.write_picture(image, folder / "images" / f"{example}.png")
                row |= {"prompt": "<image>What is this?", "images": [f"images/{example}.png"]}
            rows.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
