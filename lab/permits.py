import lab
V = [("base", ()), ("once", ("-DAT_ONCE=1",))]
for p, f in ((1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (2, 1), (3, 1)):
    V.append((f"P{p} F{f}", (f"-DCLAIM_PERMITS={p}", f"-DFLIGHT_PERMITS={f}", "-DAT_ONCE=1")))
lab.main(V, [(13, 98304), (13, 32768), (2, 98304)], (0.5, 0.9, 0.97), repeats=5)
