"""Functions of the tasks in this folder."""

import math


def share_of_truths(doc, results):
    """The share of the likelihood of all choices that the right ones have."""
    likelihoods = [math.exp(logprob) for logprob, _ in results]
    right = sum(p for p, label in zip(likelihoods, doc["labels"], strict=True) if label)
    return {"truth": right / sum(likelihoods)}
