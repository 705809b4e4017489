"""What a report concludes from its numbers."""

import math

import pytest

from training_ext.tools.report.verdict import verdict

BATCHES = {64: 0.4, 256: 0.1, 1024: 0.025}  # errors that go with 1 / B


def summary(mse, normalizer="queue", mixing=0.0) -> dict:
    estimators = [(f"batch of {size}", error) for size, error in BATCHES.items()]
    if normalizer:
        estimators.insert(0, (normalizer, mse))
    return {
        "normalizer": normalizer,
        "mixing": mixing,
        "estimators": [{"name": name, "both": {"mse": error}} for name, error in estimators],
    }


@pytest.mark.parametrize("batch", [65, 100, 250, 900])
def test_between_the_batches_it_is_worth_the_batch_of_the_same_error(batch):
    text = verdict(summary(0.4 * 64 / batch))
    assert f"worth a batch of {float(f'{batch:.2g}'):,.0f} (" in text
    assert f"off by a factor of {math.exp(math.sqrt(0.4 * 64 / batch)):.3g} " in text


def test_the_ends():
    assert "worse than a batch of 64: lower --queue-size" in verdict(summary(0.5))
    assert "worse than a batch of 64: raise --gamma" in verdict(summary(0.5, "table"))
    assert "worth more than a batch of 1,024, the largest compared" in verdict(summary(0.01))
    assert "no estimates yet" in verdict(summary(None))
    assert "off by a factor of inf" not in verdict(summary(1e30))


def test_a_batch_of_all_rows_has_no_error():
    own = summary(0.1)
    batches = [{"name": f"batch of {size}", "both": {"mse": error}} for size, error in ((2, 1), (3, 0))]
    own["estimators"] = [own["estimators"][0], *batches]
    assert "worth a batch of 2 (" in verdict(own)


def test_mixing():
    assert "before --mixing 0.6" in verdict(summary(0.2, mixing=0.6))
    assert "mixing" not in verdict(summary(0.2))


def test_a_loss_without_an_estimator():
    text = verdict(summary(None, None))
    assert text.startswith("Verdict: nothing is estimated beyond the batch; a batch of 64 is off by a factor of 1.88")
