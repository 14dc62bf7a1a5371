"""Metrics of pixels: logits (batch, classes, height, width), labels (batch, height, width).

Pixels with the label -100 do not count.
"""

from feddkd.rounds.metrics.classification import hit_rate, hits
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.outcomes import by_class, macro_f1, macro_iou
from feddkd.rounds.metrics.positions import pixels

register(
    Metric(
        "pixel_accuracy",
        "pixel accuracy",
        lambda output, batch: hits(pixels(output, batch)),
        hit_rate,
        skips_undefined=True,
    )
)
register(
    Metric(
        "iou",
        "mean IoU",
        lambda output, batch: by_class(pixels(output, batch)),
        macro_iou,
        skips_undefined=True,
    )
)
register(
    Metric(
        "dice",
        "mean Dice",
        lambda output, batch: by_class(pixels(output, batch)),
        macro_f1,  # Dice and F1 are one formula
        skips_undefined=True,
    )
)
