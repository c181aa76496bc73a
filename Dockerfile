# The trainer's image, for processors or for NVIDIA GPUs:
#   docker build -t qrag_jax .
#   docker build --build-arg EXTRAS=cuda12,hub -t qrag_jax:cuda12 .
# The CUDA libraries come with the extra, so the base image has none. A run of the quick start:
#   docker run --rm -v "$PWD/runs:/runs" qrag_jax train --config=configs/quickstart.py
#   docker run --rm --gpus all -v "$PWD/runs:/runs" qrag_jax:cuda12 train --config=…
# With no command it prints the list of commands.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY examples examples
COPY qrag_jax qrag_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# hub: encoders and data sets by their names on the Hugging Face hub.
ARG EXTRAS=hub
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
# First the versions that the tests ran with, by their hashes; then the extras, which may not change
# them.
RUN pip install --no-cache-dir --require-hashes -r /tmp/constraints.txt \
    && pip freeze > /tmp/installed.txt \
    && pip install --no-cache-dir --constraint /tmp/installed.txt \
        "$(echo /wheels/*.whl)[${EXTRAS}]" \
    && rm -rf /wheels /tmp/installed.txt
# No root: what the image writes is in /runs, a folder that the host mounts, and in HOME.
RUN useradd --create-home --uid 1000 qrag && install -d -o qrag /runs
USER 1000
WORKDIR /runs
VOLUME /runs
ENTRYPOINT ["qrag"]
CMD ["--help"]
