/* What the profilers' C part is made of: a sampler and a tracer, one module. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

PyObject *sampler_start(PyObject *self, PyObject *args);
PyObject *sampler_stop(PyObject *self, PyObject *unused);
PyObject *sampler_pause(PyObject *self, PyObject *unused);
PyObject *sampler_resume(PyObject *self, PyObject *unused);
PyObject *sampler_abandon(PyObject *self, PyObject *unused);
PyObject *sampler_seen(PyObject *self, PyObject *unused);
PyObject *before_termination(PyObject *self, PyObject *function);

/* A thread's name as `threading` has it, from its dictionary of those that run; NULL where it has none (yet). */
PyObject *thread_name(PyObject *active, unsigned long ident);
int break_evaluation(PyInterpreterState *interpreter);

extern PyMethodDef tracer_methods[];
