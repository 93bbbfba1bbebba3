# One image for all scripts and sweeps:
#
#   docker build -t plainrl .
#   mkdir -p runs
#   docker run --rm -v "$PWD/runs:/app/runs" --user "$(id -u):$(id -g)" plainrl ppo_atari.py --env-id PongNoFrameskip-v4
#
# Another base must be a Debian or Ubuntu: --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# g++: compilation; git: a run's commit; tini: signals for process 1; the others: MuJoCo's videos without a display
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git tini libegl1 libgl1-mesa-dri libopengl0 \
    && (command -v python3 || apt-get install -y --no-install-recommends python3-dev python3-venv) \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH
COPY requirements.txt ./
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -r requirements.txt

COPY . ./
# Any --user may write these. Who has no name in /etc/passwd needs USER for PyTorch's cache.
RUN useradd --create-home plainrl && mkdir -p runs sweeps searches && chmod 1777 /home/plainrl runs sweeps searches
ENV HOME=/home/plainrl USER=plainrl PYTHONUNBUFFERED=1
USER plainrl
ENTRYPOINT ["tini", "--", "python"]
CMD ["ppo_continuous_action.py", "--help"]
