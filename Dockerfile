# Never run so far. An image with zerocast, its kernels for every GPU and its command line:
#
#     docker build --tag zerocast . && docker run --rm --gpus all zerocast
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04 AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/zerocast
ENV PATH=/opt/zerocast/bin:$PATH
WORKDIR /source
COPY . .
RUN ZEROCAST_CUDA=1 pip install --no-cache-dir --constraint constraints.txt '.[cli,hf,triton]'

FROM ubuntu:24.04
# Triton compiles what starts its kernels with gcc and Python's headers.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 python3-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/zerocast /opt/zerocast
ENV PATH=/opt/zerocast/bin:$PATH
CMD ["zerocast", "doctor"]
