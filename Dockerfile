# docker build --target cpu -t agro:latest .      or --target cuda; docs/guide/hosts.md starts containers of it.
# The index's default wheel of torch has CUDA. For the CPU stage give the index of CPU wheels: --build-arg TORCH_INDEX=https://…
FROM python:3.12-slim AS base
# git and a compiler for packages that compile kernels; bubblewrap for the sandbox of programs.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends -y build-essential bubblewrap git libseccomp2 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 agro
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY . .

FROM base AS cpu
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint constraints.txt torch \
 && pip install --constraint constraints.txt '.[lora,math,sandbox,postgres]'
USER 10001
WORKDIR /work
ENTRYPOINT ["agro"]

FROM base AS cuda
RUN pip install --constraint constraints.txt '.[lora,math,sandbox,postgres,quantized]'
USER 10001
WORKDIR /work
ENTRYPOINT ["agro"]
