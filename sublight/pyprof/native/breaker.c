/* Before 3.13 a pending call from another thread is seen only when the interpreter's lock changes hands: the flag that
   makes the interpreter look is set from what the calling thread may do. This sets it. */
#define Py_BUILD_CORE 1
#include <Python.h>

#if PY_VERSION_HEX >= 0x030D0000
int break_evaluation(PyInterpreterState *interpreter) { return 1; }
#elif defined(__has_include) && __has_include(<internal/pycore_interp.h>)
#include <internal/pycore_interp.h>
int break_evaluation(PyInterpreterState *interpreter) {
    _Py_atomic_store_relaxed(&interpreter->ceval.eval_breaker, 1);
    return 1;
}
#else
int break_evaluation(PyInterpreterState *interpreter) { return 0; }
#endif
