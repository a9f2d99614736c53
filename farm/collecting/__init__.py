"""Collecting as RL does it: each step of a training run gets so many groups that teach something.

Dynamic sampling (DAPO, arXiv:2503.14476) asks for fresh instances until enough groups have rewards that differ. Here
each instance of an epoch trains once or is dropped for what its samples are, samples that have finished are played
again only where they are too old, and a trainer that was killed gets, when it asks again, what it got.

    sampler ──draw──► wave ──submit──► batch ──ends──► whole groups ──assess──► accepted │ dropped, with the reason
       ▲                │  key `RUN:wave-N`               (polled)                  │
       ├── state, kept in the wave's metadata            step record ◄──decide── the first `train_batch_size`
       │                                                 (write once)  ► what is left: carried over, or cancelled
       └── requeued, before fresh ones ◄── instances of groups that were cancelled or became too old

* `InstanceSampler`: gives the next instances for a state, which is plain JSON; it keeps nothing itself.
  `ShuffledInstances` goes through a data set epoch by epoch, `Mixture` draws from several by weight, `Curriculum`
  leaves out what the run always or never solves.
* `Wave`: one batch of up to `gen_batch_size` instances, fresh or requeued ones. Its idempotency key is the run's name
  and a number, and its metadata hold the step, the sampler's state after it and the groups that it
  stands for, so that submitting it is the one act that uses instances up.
* `GroupDecision`: a whole group is accepted, dropped as its rewards are equal or too few of its samples were scored, or
  requeued as it was cancelled or is too old. A broken sample is never a zero: it does not count.
* `RequeuedGroup`: a group whose instance is requested again, before fresh ones. Its samples that finished and are not
  too old are kept: only what is missing is played, and the new group has both.
* `CollectedStep`: the groups of a step. What they are is written to the store once, before the trainer gets them:
  the chosen groups, the waves that go on, the sampler's state, what is to be cancelled.
* `StepCollector.collect(step)`: returns the step that is recorded; else goes on from the newest record and the waves
  after it, wherever a predecessor was killed. Two trainers of one run get the same groups: the first to write decides.
* `Producer`: a thread that keeps waves in flight while the trainer trains, never more than `max_staleness` lets train.

All state is in the store: waves are batches found by their keys, steps are records found by run and number, and how
often an instance was solved is counted from its rollouts. A client has no file.
"""

from farm.collecting.curriculum import Curriculum
from farm.collecting.group_decisions import GroupDecision
from farm.collecting.instance_samplers import InstanceSampler, ShuffledInstances
from farm.collecting.mixture import Mixture
from farm.collecting.options import CollectingOptions
from farm.collecting.producer import Producer
from farm.collecting.step_collector import StepCollector
from farm.collecting.waves import CollectedStep

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
