/* What the profilers' C part is made of: a sampler and a tracer, one module. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <pthread.h>
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
PyObject *termination_pause(PyObject *self, PyObject *unused);
PyObject *termination_resume(PyObject *self, PyObject *unused);

/* A thread's name as `threading` has it, from its dictionary of those that run; NULL where it has none (yet). */
PyObject *thread_name(PyObject *active, unsigned long ident);
/* Wait for a thread's end, and until the kernel counts it no more: Python does before it forks, and would warn. */
void join_thread(pthread_t thread, long tid);
/* ns that a thread was ready to run, and had no core; -1 where the system does not tell. `file` begins as -2. */
int64_t core_delay(long tid, int *file);
/* What a thread does now: it waits for the interpreter's LOCK, waits ELSEWHERE, or is READY to run, or runs. */
enum { UNKNOWN = -1, ELSEWHERE, LOCK, READY };
int thread_state(long tid, int *file);
int break_evaluation(PyInterpreterState *interpreter);

int add_tracer(PyObject *module);
