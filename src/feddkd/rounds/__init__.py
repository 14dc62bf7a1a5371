"""The loop over rounds: exchanges, evaluation, costs, availability, diagnostics, privacy."""
