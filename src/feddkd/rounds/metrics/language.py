"""Metrics of tokens: logits (batch, length, vocabulary), labels (batch, length).

Tokens with the label -100 do not count. All means are over tokens, not over examples.
"""

import math

from feddkd.rounds.metrics.classification import hit_rate, hits
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.positions import of, tokens
from feddkd.rounds.metrics.probabilities import mean, surprise

for name, title, value in (
    ("perplexity", "perplexity", lambda sums: mean(sums).exp()),
    ("bits_per_token", "bits per token", lambda sums: mean(sums) / math.log(2)),
):
    register(
        Metric(
            name,
            title,
            of(tokens, surprise),
            value,
            higher_is_better=False,
            percent=False,
            skips_undefined=True,
        )
    )
register(
    Metric("token_accuracy", "token accuracy", of(tokens, hits), hit_rate, skips_undefined=True)
)
