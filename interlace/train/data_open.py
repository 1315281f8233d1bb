"""The data that the settings ask for, the same on every rank."""

from __future__ import annotations

from interlace.train.config import Config
from interlace.train.data import Data, open_data
from interlace.train.world import World, gather


def global_batch_rows(config: Config, world: World) -> int:
    """Rows of a step over all ranks."""
    return config.training.local_batch_size * world.size


def open_training_data(config: Config, world: World) -> Data:
    """Opens ``data.source``; rows that an evaluation will use are kept out.

    Raises: ValueError on every rank if ranks read different data, or one batch is more than all.
    """
    e, num_rows = config.evaluation, global_batch_rows(config, world)
    held_out = e.batches * num_rows if e.interval and not e.source else 0
    data = _open(config, config.data.source, held_out)
    fingerprints = gather(data.fingerprint, world)
    if len(set(fingerprints)) > 1:
        odd = next(r for r, x in enumerate(fingerprints) if x != fingerprints[0])
        raise ValueError(
            f"data.source={config.data.source}: rank {odd} reads other data than rank 0 "
            f"(checksums {fingerprints[odd]} and {fingerprints[0]}); give all ranks the same files."
        )
    if config.data.at_end == "stop" and data.num_steps(num_rows) == 0:
        raise ValueError(
            f"data.source={config.data.source} has {data.num_rows} rows, less than the {num_rows} "
            f"of one step, and data.at_end=stop; use data.at_end=wrap or a smaller "
            f"training.local_batch_size."
        )
    return data


def open_evaluation_data(config: Config, training: Data) -> tuple[Data, bool]:
    """The data of evaluations, and whether it is the part held out of the training data."""
    source = config.evaluation.source
    return (_open(config, source, 0), False) if source else (training, True)


def last_step(config: Config, data: Data, world: World) -> int:
    """How many steps the run will have: training.steps, or fewer if data.at_end=stop says so."""
    end = data.num_steps(global_batch_rows(config, world))
    if config.data.at_end == "wrap" or end is None:
        return config.training.steps
    return min(config.training.steps, end)


def _open(config: Config, source: str, held_out_rows: int) -> Data:
    d = config.data
    return open_data(
        source,
        vocab_size=config.model.vocab_size,
        seq_len=config.training.seq_len,
        max_documents=d.max_documents,
        seed=config.debug.seed,
        separator=d.separator,
        text_field=d.text_field,
        tokenizer=d.tokenizer,
        held_out_rows=held_out_rows,
    )
