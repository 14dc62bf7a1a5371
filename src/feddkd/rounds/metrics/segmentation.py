"""Metrics of pixels: logits (batch, classes, height, width), labels (batch, height, width).

Pixels with the label -100 do not count.
"""

from feddkd.rounds.metrics.classification import hit_rate, hits
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.outcomes import by_class, macro_f1, macro_iou
from feddkd.rounds.metrics.positions import of, pixels

for name, title, count, value in (
    ("pixel_accuracy", "pixel accuracy", hits, hit_rate),
    ("iou", "mean IoU", by_class, macro_iou),
    ("dice", "mean Dice", by_class, macro_f1),  # Dice and F1 are one formula
):
    register(Metric(name, title, of(pixels, count), value, skips_undefined=True))
