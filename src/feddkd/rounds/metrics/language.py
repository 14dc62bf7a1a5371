"""Metrics of tokens: logits (batch, length, vocabulary), labels (batch, length).

Tokens with the label -100 do not count. All means are over tokens, not over examples.
"""

import math

from feddkd.rounds.metrics.classification import hit_rate, hits
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.positions import tokens
from feddkd.rounds.metrics.probabilities import mean, surprise

register(
    Metric(
        "perplexity",
        "perplexity",
        lambda output, batch: surprise(tokens(output, batch)),
        lambda sums: mean(sums).exp(),
        higher_is_better=False,
        percent=False,
        skips_undefined=True,
    )
)
register(
    Metric(
        "bits_per_token",
        "bits per token",
        lambda output, batch: surprise(tokens(output, batch)),
        lambda sums: mean(sums) / math.log(2),
        higher_is_better=False,
        percent=False,
        skips_undefined=True,
    )
)
register(
    Metric(
        "token_accuracy",
        "token accuracy",
        lambda output, batch: hits(tokens(output, batch)),
        hit_rate,
        skips_undefined=True,
    )
)
