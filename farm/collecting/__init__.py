"""Collecting for RL: each step of a training run gets a fixed number of groups to learn from.

Dynamic sampling (DAPO, arXiv:2503.14476) requests fresh instances until enough groups have rewards that differ. Here
each instance of an epoch trains once or is dropped because of its samples, finished samples run again only if they are
too old, and a restarted trainer gets the groups of a step that it had before.

    sampler ──draw──► wave ──submit──► batch ──ends──► whole groups ──assess──► accepted │ dropped, with the reason
       ▲                │  key `RUN:wave-N`               (polled)                  │
       ├── state, kept in the wave's metadata            step record ◄──decide── the first `train_batch_size`
       │                                                 (write once)  ► the rest: carried over, or cancelled
       └── requeued, before fresh ones ◄── instances of groups that were cancelled or became too old

* `InstanceSampler`: returns the next instances for a state, which is plain JSON; it keeps no state itself.
  `ShuffledInstances` cycles through a data set in epochs, `Mixture` draws from several by weight, `Curriculum` leaves
  out instances that the run always or never solves.
* `Wave`: one batch of up to `gen_batch_size` fresh or requeued instances. Its idempotency key is the run's name and a
  number. Its metadata have the step, the sampler's state after it and the groups that it replaces, so submitting it is
  the only act that consumes instances.
* `GroupDecision`: a whole group is accepted; dropped because its rewards are equal or too few of its samples were
  scored; or requeued because it was cancelled or is too old. A failed sample never counts as zero: it does not count.
* `RequeuedGroup`: a group whose instance is requested again, before fresh ones. Finished samples that are not too old
  are kept: only the missing ones run, and the new group has both.
* `CollectedStep`: the groups of a step. Its record is written to the store once, before the trainer gets them: the
  chosen groups, the waves that continue, the sampler's state, the groups to cancel.
* `StepCollector.collect(step)`: returns the recorded step; else continues from the newest record and the waves after
  it, wherever a predecessor was killed. Two trainers of one run get the same groups: the first to write decides.
* `Producer`: a thread that keeps waves in flight while the trainer trains, but never more than `max_staleness` allows
  to train.

All state is in the store: waves are batches found by their keys, steps are records found by run and number, and solve
rates are counted from rollouts. A client has no file.
"""

from farm.collecting.instance_samplers import Curriculum, InstanceSampler, Mixture, ShuffledInstances
from farm.collecting.options import CollectingOptions
from farm.collecting.step_collector import Producer, StepCollector
from farm.collecting.waves import CollectedStep, GroupDecision

__all__ = [
    "CollectedStep",
    "CollectingOptions",
    "Curriculum",
    "GroupDecision",
    "InstanceSampler",
    "Mixture",
    "Producer",
    "ShuffledInstances",
    "StepCollector",
]
