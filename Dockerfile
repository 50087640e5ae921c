# The whole program in one container: page, workers, embedded Redis, SQLite under /data.
#
#   docker build -t clef .
#   docker run -p 7860:7860 -v clef:/data -e CLEF_API_KEY=... -e CLEF_AUTH=user:password clef
#
# Inside a container the page must listen on every address, so it starts only with a key for HTTP and a login for the
# page (or with CLEF_ALLOW_ANONYMOUS=1). Reached by another name than localhost, that name goes into CLEF_ALLOWED_HOSTS.
#
# With a GPU, give a base image with Python 3.11 or newer; where it brings its own torch (CUDA or ROCm), that one is kept:
#
#   docker build --build-arg BASE=pytorch/pytorch:<tag> -t clef .      then: docker run --gpus all ...
#   docker build --build-arg BASE=rocm/pytorch:<tag> -t clef .         then: docker run --device /dev/kfd --device /dev/dri ...
ARG BASE=python:3.11-slim
FROM ${BASE}

WORKDIR /app
COPY requirements.txt .
# The environment sees the packages of the base image. Its torch is built for its drivers and must not be replaced by
# pip's, so the pins of torch and torchvision count only where the base has none.
RUN python3 -m venv --system-site-packages /opt/clef \
    && if /opt/clef/bin/python -c "import torch" 2>/dev/null; then sed -i "/^torch/d" requirements.txt; fi \
    && /opt/clef/bin/pip install --no-cache-dir -r requirements.txt

COPY . .
# No fixed user id: some bases have taken 1000 already.
RUN useradd --system --create-home --home-dir /home/clef clef && mkdir /data && chown clef /data
USER clef
VOLUME /data
ENV PATH=/opt/clef/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_WAIT_POLICY=PASSIVE \
    HF_HOME=/data/huggingface \
    CLEF_HOST=0.0.0.0 \
    CLEF_DATA_DIR=/data
EXPOSE 7860
HEALTHCHECK --start-period=10m --interval=30s --timeout=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/healthz', timeout=8)"]
CMD ["python", "app.py"]
