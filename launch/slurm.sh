#!/usr/bin/env bash
# sbatch launch/slurm.sh [TOPOLOGY] [OPTION...]: serve a topology on one node of a SLURM cluster, from the repository's root.
# The ranks of a world share a host, so it is always one node; set --gres to as many cards as the topology has ranks.
# `scancel --batch --signal=TERM JOB` drains: requests in flight are finished, then the job ends.
# Tried: `launch/slurm.sh --help` without SLURM (a test does it). Not tried: on a cluster.
#SBATCH --job-name=tpspec
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=32
#SBATCH --time=7-00:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=tpspec-%j.log
set -euo pipefail

# SLURM runs a copy of this script, so its own path says nothing.
cd "${SLURM_SUBMIT_DIR:-.}"
[ -x launch/serve ] || { echo "tpspec: error: run sbatch in the root of the repository" >&2; exit 2; }

echo "tpspec: on $(hostname); from elsewhere: ssh -N -L 8000:127.0.0.1:8000 $(hostname)"
exec launch/serve "$@" # torchrun becomes the batch script's process, to which SLURM's signal goes
