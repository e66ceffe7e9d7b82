"""From files to examples: reading, shapes, encoding, what is learned, splits and mixtures.

    data = open_data(DataConfig(path="my_data/"), tokenizer, context=2048)
    print(*data.report.lines(), sep="\\n")
    batches = Batches(data.train, batch_size=4)
"""

from mlxgen.training.data.open import Data, open_data
from mlxgen.training.data.report import DataReport

__all__ = ["Data", "DataReport", "open_data"]
