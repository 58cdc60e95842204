#!/bin/sh
# A run of agro as a job of Slurm: sbatch --nodes=4 slurm.sh, with what your cluster wants, such as --partition, --gpus, --time.
# The first node has the owner of the store and the trainer, all have a collector. All nodes share this folder, which
# has recipe.toml, prompts and reward. A requeued job resumes the run.
#SBATCH --ntasks-per-node=1 --requeue --open-mode=append
export AGRO_TOKEN=$(openssl rand -hex 24) # srun passes it on
owner="http://$(hostname):8700"
mkdir -p runs/cluster
agro store serve runs/cluster/store.db --host 0.0.0.0 --port 8700 & served=$!
[ -e runs/cluster/metrics.jsonl ] && resume=--resume
srun --overlap sh -c 'exec agro collect "$0" --name "collector-$SLURM_PROCID"' "$owner" & collectors=$!
agro train recipe.toml source.kind=elsewhere data.max_age=2 --out runs/cluster --owner "$owner" $resume; code=$?
[ $code = 0 ] && wait $collectors
kill $served; exit $code
