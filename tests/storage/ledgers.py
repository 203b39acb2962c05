"""Records of made-up runs, for tests of the ledger."""


def issue(ledger, group, step=1, attempt=0):
    ledger.record("issued", work=group, task=group, environment="w", step=step, attempt=attempt)


RESULT = {"trajectories": ["a", "b"], "rewards": [1.0, None], "digest": "00"}


def seal(ledger, work, step=1, groups=None):
    """Work that gave one group of its name, or these."""
    names = [work] if groups is None else groups
    ledger.record("sealed", work=work, step=step, groups=dict.fromkeys(names, RESULT))


def one_step(ledger, step, groups):
    for group in groups:
        issue(ledger, group, step)
    for group in groups:
        seal(ledger, group, step)
    ledger.record("trained", step=step, update=0, groups=groups)
    ledger.record("published", version=step)
    ledger.commit()
