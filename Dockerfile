# smelt serve on a CPU: docker build -t smelt . && docker run -p 127.0.0.1:8000:8000 -v ./my-llama:/model:ro smelt /model
FROM python:3.11-slim-bookworm AS built
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY compress compress
COPY distill distill
COPY models models
COPY prune prune
COPY quant quant
COPY recipes recipes
COPY runtime runtime
COPY system system
# torch's builds for CPUs, without gigabytes of CUDA.
RUN python -m venv /opt/smelt \
    && /opt/smelt/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint constraints.txt torch==2.13.0+cpu .

FROM python:3.11-slim-bookworm
# The CPU kernels are compiled at the first start, for the processor that is there.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 smelt \
    && install --directory --owner smelt --group smelt /home/smelt/.cache
COPY --from=built /opt/smelt /opt/smelt
ENV PATH=/opt/smelt/bin:$PATH HF_HUB_OFFLINE=1
USER smelt
# Compiled kernels; a volume here keeps them for the next start.
VOLUME /home/smelt/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
# All interfaces of the container; which of the host's reach them is -p's to say.
ENTRYPOINT ["smelt", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["builtin:smelt-6m"]
