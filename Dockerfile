# The trainer's image, for processors or for NVIDIA GPUs:
#   docker build -t qrag_jax .
#   docker build --build-arg EXTRAS=cuda12,hub -t qrag_jax:cuda12 .
# The CUDA libraries come with the extra, so the base image has none. The quick start, which leaves
# runs/quickstart in the working folder:
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" qrag_jax \
#     train --config=configs/quickstart.py
# Add --gpus all for qrag_jax:cuda12. With no command it prints the list of commands.

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
# No root: `--user` names who owns the mounted folder, /work, and every user may write the caches in
# HOME.
RUN useradd --create-home --uid 1000 qrag && chmod 777 /home/qrag && install -d -o qrag /work
ENV HOME=/home/qrag
USER 1000
WORKDIR /work
ENTRYPOINT ["qrag"]
CMD ["--help"]
