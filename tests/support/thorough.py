"""Whether every case runs, as in `make faults`, or the samples of `make test`."""

import os

IS_THOROUGH = os.environ.get("EFORMER_SAMPLE") == "1" or os.environ.get("EFORMER_FAULTS_STRIDE") == "1"
