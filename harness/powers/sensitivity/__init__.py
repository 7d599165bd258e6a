"""How much a case's agreement shows: each operator call of a step is made wrong by one ULP, and who notices?

`program` writes a step of every rank, optimizer included, as one list of calls; `lockstep` runs it for all ranks in
one process, with the very bits that ranks record; `bits` makes values wrong, `neighbours` formulas; `spread` follows
what is wrong from call to call, until a compared tensor shows it or nothing of it is left; `examine` gives each call's
result. Who forks, waits and reports is `harness.powers.sensitivity.sensing`.
"""
