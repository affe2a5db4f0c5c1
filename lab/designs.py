import sys
import lab
from echokv.kernels.cuda import fetch_listed, index_scores
import echokv.kernels.cuda.build as build
def use(how):
    threads, flying, claims, *more = how
    fetch_listed.THREADS = index_scores.FETCHING_THREADS = fetch_listed.MODULE.threads = threads
    build.OPTIONS = (*lab.BASE, f"-DLISTED_THREADS={threads}", f"-DFLYING={flying}", f"-DCLAIMS={claims}", *(f"-DFTOPK={n}" for n in more))
    fetch_listed.MODULE._functions.clear()
    for beside in (False, True): fetch_listed.MODULE.load(lab.device, fetch_listed.KERNELS, beside=beside)
    build.OPTIONS = lab.BASE
lab.use = use
V = [("/".join(map(str, v[1:])), v) for v in ((128, 1, 4), (128, 2, 4), (128, 3, 4), (128, 2, 4, 1), (128, 3, 4, 1), (128, 3, 4, 2), (128, 2, 8, 1))]
if __name__ == "__main__": lab.main(V, [(13, 98304), (13, 32768), (2, 98304), (1, 98304)], (0.5, 0.9, 0.97, 1.0), repeats=5)
