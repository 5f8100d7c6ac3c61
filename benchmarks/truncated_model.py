"""A small draft model out of the packaged one: some of its layers left out, everything else as it is.

    python -m benchmarks.truncated_model OUT.gguf [--model default] [--layers 0-7]

Nobody trained the result, so it guesses poorly; it serves to try a draft model where there is only one model. Needs the
development dependencies.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import Keys

from backend_service.models import locate_model
from backend_service.settings import parse_cpus

_LAYER = re.compile(r"^blk\.(\d+)\.")
_WRITTEN_BY_THE_WRITER = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", Keys.General.ARCHITECTURE}


def truncate(source: Path, target: Path, layers: Sequence[int]) -> None:
    """Write to `target` the model in `source` with only these layers, in this order. Raises ValueError unless the
    model has all of them."""
    reader = GGUFReader(source)
    architecture = str(reader.fields[Keys.General.ARCHITECTURE].contents())
    count_key = Keys.LLM.BLOCK_COUNT.format(arch=architecture)
    count = int(reader.fields[count_key].contents())
    if not layers or not set(layers) <= set(range(count)):
        raise ValueError(f"{source.name} has the layers 0 to {count - 1}; keep at least one of them, and no others")
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name in _WRITTEN_BY_THE_WRITER:
            continue
        value = len(layers) if field.name == count_key else field.contents()
        of = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=of)
    new_places = {layer: place for place, layer in enumerate(layers)}
    kept = []
    for tensor in reader.tensors:
        name = tensor.name
        if of_layer := _LAYER.match(name):
            layer = int(of_layer[1])
            if layer not in new_places:
                continue
            name = f"blk.{new_places[layer]}.{name[of_layer.end() :]}"
        writer.add_tensor_info(name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type)
        kept.append(tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in kept:
        writer.write_tensor_data(tensor.data)
    writer.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--layers", default="0-7", help="layers to keep, such as 0-5,28-29")
    options = parser.parse_args()
    truncate(locate_model(options.model), options.out, sorted(parse_cpus(options.layers)))


if __name__ == "__main__":
    main()
