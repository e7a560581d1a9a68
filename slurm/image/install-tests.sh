#!/bin/sh
# Turns the base layer into that of the tests: pytest with its plugins, torchdata, matplotlib, textual, and pyslurm.
# Reads /recipe/requirements.txt, /recipe/constraints.txt and, where one was built, a wheel in /wheels.
set -eu
set -- --quiet --disable-pip-version-check --no-cache-dir
/opt/muster/bin/pip install "$@" -c /recipe/constraints.txt -r /recipe/requirements.txt
for wheel in /wheels/*.whl; do
    if [ -e "$wheel" ]; then /opt/muster/bin/pip install "$@" --no-deps "$wheel"; fi
done
