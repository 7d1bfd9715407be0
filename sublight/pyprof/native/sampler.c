/* Looks at the stacks of all threads so many times a second, from a thread that needs no interpreter.

   The ticker sleeps without the interpreter's lock. Where the main thread runs Python it looks there itself, at its
   next safe point (a pending call): no thread changes hands, which is what a look costs most. Where it does not come to
   one, the ticker takes the lock. A thread's own CPU clock tells how long it ran since the last look; the system tells
   how long it waited for a core, and whether it waits for the interpreter's lock now. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEEPEST 1000      /* frames of a stack that are kept, from the inside; as many as Python lets a program have by default */
#define MOST_STACKS 50000 /* distinct ones; those that come later are counted as stack 0 */
#define MOST_PLACES 10000000 /* in all of them: 160 MB */
#define MOST_ROWS 400000  /* after that only every other look is made, then every fourth */
#define LONGEST 8         /* a look may be as many times later than asked for where the main thread waits for a core */
#define SMALL_PART 10
#define WAITS 10          /* a thread that ran for less than 1 - 1/WAITS of the time has waited: ask the system why */

typedef struct { PyCodeObject *code; int instruction; } Place;
typedef struct { uint64_t hash; int depth; Place *places; } Stack;
typedef struct { int64_t time, wall, cpu, core, look, late; int32_t thread, stack, state; } Row;
typedef struct { uint64_t id; long tid; int64_t cpu, delay; int64_t seen; int syscall_fd, sched_fd; unsigned long ident; PyObject *name; } Thread;

static struct {
    Stack *stacks; int stack_count, stack_room; int *slots; int slot_count; size_t places;
    Row *rows; size_t row_count, row_room, drained;
    Thread *threads; int thread_count, thread_room;
    pthread_t ticker; long ticker_tid;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_int running, asked;   /* asked: a look is due in the main thread, by this number */
    int due, every, paused;
    int64_t period, slept, last, late, looks, main_cpu, spent, ticker_cpu; /* spent: CPU time of looks in the main thread */
    Thread main;                 /* for the ticker's questions; `threads` is the look's */
    PyThreadState *own;          /* the ticker's */
    PyInterpreterState *interpreter;
} S;

static PyObject *active; /* threading's threads, by ident */

static int64_t now_of(clockid_t clock) {
    struct timespec t;
    return clock_gettime(clock, &t) ? -1 : t.tv_sec * 1000000000LL + t.tv_nsec;
}

static clockid_t cpu_clock(long tid) { return ((~(clockid_t)tid) << 3) | 6; } /* the kernel's: a thread that ended is an error */

static int64_t delay_of(Thread *t) { return core_delay(t->tid, &t->sched_fd); }

static int state_of(Thread *t) { return thread_state(t->tid, &t->syscall_fd); }

static Thread *thread_of(PyThreadState *state) {
    for (int i = S.thread_count - 1; i >= 0; i--)
        if (S.threads[i].id == state->id && S.threads[i].ident == state->thread_id) return &S.threads[i];
    if (S.thread_count == S.thread_room) {
        int room = S.thread_room ? 2 * S.thread_room : 16;
        Thread *more = realloc(S.threads, room * sizeof(Thread));
        if (!more) return NULL;
        S.threads = more, S.thread_room = room;
    }
    Thread *t = &S.threads[S.thread_count++];
    *t = (Thread){.id = state->id, .tid = (long)state->native_thread_id, .cpu = -1, .delay = -1, .syscall_fd = -2,
                  .sched_fd = -2, .ident = state->thread_id, .seen = -1};
    return t;
}

static void close_files(Thread *t) {
    if (t->syscall_fd >= 0) close(t->syscall_fd);
    if (t->sched_fd >= 0) close(t->sched_fd);
    t->syscall_fd = t->sched_fd = -2;
}

static int grow_slots(void) {
    int count = S.slot_count ? 2 * S.slot_count : 4096;
    int *slots = malloc(count * sizeof(int));
    if (!slots) return -1;
    memset(slots, 0xff, count * sizeof(int));
    for (int i = 0; i < S.stack_count; i++) {
        uint64_t at = S.stacks[i].hash & (count - 1);
        while (slots[at] >= 0) at = (at + 1) & (count - 1);
        slots[at] = i;
    }
    free(S.slots);
    S.slots = slots, S.slot_count = count;
    return 0;
}

static int stack_of(Place *places, int depth) {
    uint64_t hash = 14695981039346656037ULL;
    for (int i = 0; i < depth; i++) {
        hash = (hash ^ (uintptr_t)places[i].code) * 1099511628211ULL;
        hash = (hash ^ (unsigned)places[i].instruction) * 1099511628211ULL;
    }
    hash ^= hash >> 29;
    if (2 * S.stack_count >= S.slot_count && grow_slots()) return 0;
    uint64_t at = hash & (S.slot_count - 1);
    for (; S.slots[at] >= 0; at = (at + 1) & (S.slot_count - 1)) {
        Stack *s = &S.stacks[S.slots[at]];
        if (s->hash == hash && s->depth == depth && !memcmp(s->places, places, depth * sizeof(Place))) return S.slots[at];
    }
    if (S.stack_count >= MOST_STACKS || S.places + depth > MOST_PLACES) return 0;
    if (S.stack_count == S.stack_room) {
        int room = S.stack_room ? 2 * S.stack_room : 1024;
        Stack *more = realloc(S.stacks, room * sizeof(Stack));
        if (!more) return 0;
        S.stacks = more, S.stack_room = room;
    }
    Place *kept = malloc((depth ? depth : 1) * sizeof(Place));
    if (!kept) return 0;
    memcpy(kept, places, depth * sizeof(Place));
    for (int i = 0; i < depth; i++) Py_INCREF(kept[i].code); /* else another could get the same address */
    S.stacks[S.stack_count] = (Stack){hash, depth, kept};
    S.slots[at] = S.stack_count;
    S.places += depth;
    return S.stack_count++;
}

static int walk(PyThreadState *state, Place *places) {
    int depth = 0;
    PyFrameObject *frame = PyThreadState_GetFrame(state);
    while (frame) {
        if (depth < DEEPEST) {
            memset(&places[depth], 0, sizeof(Place)); /* its padding is compared, too */
            places[depth].code = PyFrame_GetCode(frame);
            places[depth++].instruction = PyFrame_GetLasti(frame);
        }
        PyFrameObject *back = depth < DEEPEST ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    return depth;
}

static int add_row(Row row) {
    if (S.row_count == S.row_room) {
        size_t room = S.row_room ? 2 * S.row_room : 4096;
        Row *more = realloc(S.rows, room * sizeof(Row));
        if (!more) return -1;
        S.rows = more, S.row_room = room;
    }
    S.rows[S.row_count++] = row;
    return 0;
}

/* With the interpreter's lock held, in the thread `here`. Errors of the program that is looked at are left alone. */
static void look(long here) {
    Place places[DEEPEST];
    int64_t now = now_of(CLOCK_MONOTONIC), wall = now - S.last;
    S.last = now;
    S.looks++;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (PyThreadState *state = PyInterpreterState_ThreadHead(S.interpreter); state; state = PyThreadState_Next(state)) {
        if (state == S.own) continue;
        Thread *t = thread_of(state);
        if (!t) break;
        int depth = walk(state, places);
        if (depth) {
            int64_t cpu = now_of(cpu_clock(t->tid)), ran = t->cpu >= 0 && cpu >= 0 ? cpu - t->cpu : -1;
            t->cpu = cpu;
            if (t->tid == S.main.tid) S.main_cpu = cpu;
            Row row = {.time = now_of(CLOCK_REALTIME), .wall = wall, .cpu = ran, .core = -1, .look = S.looks, .late = S.late,
                       .thread = (int32_t)(t - S.threads), .stack = stack_of(places, depth), .state = UNKNOWN};
            if (ran >= 0 && ran < wall - wall / WAITS) {
                int64_t delay = delay_of(t);
                row.core = t->delay >= 0 && delay >= 0 ? delay - t->delay : -1;
                if (row.core > wall - ran) row.core = wall - ran;
                row.state = t->tid == here ? READY : state_of(t); /* it runs this very look */
                t->delay = delay;
            } else {
                row.core = 0, row.state = READY;
                if (t->delay >= 0) t->delay = delay_of(t);
            }
            if (t->seen >= 0) add_row(row); /* its first look has no time before it */
            if (!t->name) t->name = thread_name(active, t->ident);
            t->seen = now;
            for (int i = 0; i < depth; i++) Py_DECREF(places[i].code);
        }
    }
    for (int i = 0; i < S.thread_count; i++)
        if (S.threads[i].seen != now) close_files(&S.threads[i]); /* it has ended */
    if (S.row_count > (size_t)MOST_ROWS * S.every) S.every *= 2;
    PyErr_Restore(type, value, trace);
}

static int pending(void *number) {
    int wanted = (int)(intptr_t)number;
    if (atomic_load(&S.running) && atomic_compare_exchange_strong(&S.asked, &wanted, 0)) {
        int64_t before = now_of(CLOCK_THREAD_CPUTIME_ID);
        S.late = 0;
        look(S.main.tid);
        S.spent += now_of(CLOCK_THREAD_CPUTIME_ID) - before;
    }
    return 0;
}

/* Whether to go on: `end_ticker` wakes the sleeper. */
static int sleep_until(int64_t due) {
    struct timespec until = {due / 1000000000, due % 1000000000};
    pthread_mutex_lock(&S.mutex);
    while (atomic_load(&S.running) && pthread_cond_timedwait(&S.wake, &S.mutex, &until) != ETIMEDOUT) {}
    pthread_mutex_unlock(&S.mutex);
    return atomic_load(&S.running);
}

/* Until the next look: the period that was asked for, in time that the main thread has a core. Where it waits for one most
   of the time, looks by the clock would be many for each second that it runs, and see where they saw it before. A look's
   time is its last stack's: it is a small part of the time since the thread slept, so that a sleep gets little of it. */
static int64_t next_period(int64_t now, int64_t cpu, int64_t period) {
    int64_t wall = now - S.main.seen, ran = cpu - S.main.cpu, waited = 0;
    S.main.seen = now, S.main.cpu = cpu;
    if (ran < wall / 2) {
        int64_t delay = delay_of(&S.main);
        if (S.main.delay >= 0 && delay >= 0) waited = delay - S.main.delay;
        S.main.delay = delay;
        if (waited + ran < wall / 2) {
            if (state_of(&S.main) == READY) return period; /* it still waits: the system adds a wait when it ends */
            S.slept = now;
        }
    }
    int64_t wanted = S.period * (1.0 + (double)waited / (double)(ran + 1)), most = (now - S.slept) / SMALL_PART;
    if (most > LONGEST * S.period) most = LONGEST * S.period;
    if (wanted > most) wanted = most;
    return wanted > S.period ? wanted : S.period;
}

static void *tick(void *unused) {
    int64_t due = now_of(CLOCK_MONOTONIC), turn = 0, asked_at = 0, period = S.period;
    S.ticker_tid = syscall(SYS_gettid);
    PyGILState_STATE state = PyGILState_Ensure();
    S.own = PyThreadState_Get();
    PyEval_SaveThread();
    while (atomic_load(&S.running)) {
        int64_t now = now_of(CLOCK_MONOTONIC);
        due = due + period > now ? due + period : now + period / 2; /* a look that came late is not made up for */
        if (!sleep_until(due)) break;
        if (++turn % S.every) continue;
        int64_t cpu = now_of(cpu_clock(S.main.tid)), ran = cpu - S.main_cpu, looks = S.looks;
        int outstanding = atomic_load(&S.asked);
        period = next_period(now_of(CLOCK_MONOTONIC), cpu, period);
        if (outstanding && ran < asked_at + S.period / 2 && state_of(&S.main) == READY) continue; /* it has no core */
        if (!outstanding && ran > S.period / 5) {
            if (++S.due > 0x3fffffff) S.due = 1;
            atomic_store(&S.asked, S.due);
            asked_at = ran;
            if (!Py_AddPendingCall(pending, (void *)(intptr_t)S.due) && break_evaluation(S.interpreter)) continue;
            atomic_store(&S.asked, 0);
        }
        int64_t before = now_of(CLOCK_MONOTONIC);
        PyEval_RestoreThread(S.own);
        S.late = now_of(CLOCK_MONOTONIC) - before;
        if (atomic_load(&S.running) && S.looks == looks) { /* else the main thread has looked meanwhile */
            atomic_store(&S.asked, 0);
            look(S.ticker_tid);
        }
        PyEval_SaveThread();
    }
    PyEval_RestoreThread(S.own);
    S.ticker_cpu += now_of(CLOCK_THREAD_CPUTIME_ID);
    S.own = NULL;
    PyGILState_Release(state);
    return NULL;
}

static int begin_ticker(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&S.wake, &monotonic); /* anew each time: a fork may have left them as they were */
    pthread_mutex_init(&S.mutex, NULL);
    atomic_store(&S.asked, 0);
    atomic_store(&S.running, 1);
    int error = pthread_create(&S.ticker, NULL, tick, NULL);
    if (error) atomic_store(&S.running, 0);
    return error;
}

/* Whether it ran. */
static int end_ticker(void) {
    if (!atomic_load(&S.running)) return 0;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&S.mutex);
    atomic_store(&S.running, 0);
    pthread_cond_signal(&S.wake);
    pthread_mutex_unlock(&S.mutex);
    join_thread(S.ticker, S.ticker_tid);
    Py_END_ALLOW_THREADS
    return 1;
}

PyObject *sampler_start(PyObject *self, PyObject *args) {
    double hz;
    PyObject *threads;
    if (!PyArg_ParseTuple(args, "dO", &hz, &threads)) return NULL;
    if (atomic_load(&S.running)) Py_RETURN_NONE;
    Py_INCREF(threads);
    Py_XSETREF(active, threads);
    S.period = (int64_t)(1e9 / hz);
    if (S.period < 20000) S.period = 20000;
    if (!S.every) S.every = 1;
    if (!S.stack_count) stack_of(NULL, 0); /* stack 0: too many different ones */
    S.interpreter = PyThreadState_GetInterpreter(PyThreadState_Get());
    S.last = S.slept = now_of(CLOCK_MONOTONIC);
    S.main_cpu = now_of(cpu_clock(getpid()));
    S.main = (Thread){.tid = getpid(), .cpu = S.main_cpu, .seen = S.last, .delay = -1, .syscall_fd = -2, .sched_fd = -2};
    for (int i = 0; i < S.thread_count; i++) S.threads[i].cpu = S.threads[i].delay = S.threads[i].seen = -1;
    for (PyThreadState *state = PyInterpreterState_ThreadHead(S.interpreter); state; state = PyThreadState_Next(state))
        if ((long)state->native_thread_id == S.main.tid) thread_of(state); /* it is the first, whoever began before us */
    look(syscall(SYS_gettid)); /* the clocks' first reading */
    errno = begin_ticker();
    if (errno) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

PyObject *sampler_stop(PyObject *self, PyObject *unused) {
    if (end_ticker() || S.paused) {
        S.paused = 0;
        look(syscall(SYS_gettid)); /* the time since the last look is somebody's, too */
        for (int i = 0; i < S.thread_count; i++) close_files(&S.threads[i]);
        close_files(&S.main);
    }
    Py_RETURN_NONE;
}

/* Around a fork: Python warns of one beside threads, and it is safer without. */
PyObject *sampler_pause(PyObject *self, PyObject *unused) {
    S.paused |= end_ticker();
    Py_RETURN_NONE;
}

PyObject *sampler_resume(PyObject *self, PyObject *unused) {
    if (S.paused) begin_ticker();
    S.paused = 0;
    Py_RETURN_NONE;
}

/* In a forked child: the ticker stayed with the parent, and what it saw is the parent's. */
PyObject *sampler_abandon(PyObject *self, PyObject *unused) {
    atomic_store(&S.running, 0);
    atomic_store(&S.asked, 0);
    S.paused = 0;
    for (int i = 0; i < S.thread_count; i++) close_files(&S.threads[i]);
    close_files(&S.main);
    S.thread_count = 0, S.row_count = 0, S.looks = 0, S.every = 1, S.spent = S.ticker_cpu = 0;
    S.own = NULL; /* Python has freed the states of threads that the child does not have */
    Py_RETURN_NONE;
}

/* (stacks as lists of (code, instruction), innermost first; rows; names, idents and numbers of the threads; looks; the CPU time that they took) */
PyObject *sampler_seen(PyObject *self, PyObject *unused) {
    PyObject *stacks = PyList_New(S.stack_count), *rows = PyList_New(S.row_count), *threads = PyList_New(S.thread_count);
    if (!stacks || !rows || !threads) goto failed;
    for (int i = 0; i < S.stack_count; i++) {
        PyObject *stack = PyList_New(S.stacks[i].depth);
        if (!stack) goto failed;
        PyList_SET_ITEM(stacks, i, stack);
        for (int k = 0; k < S.stacks[i].depth; k++) {
            PyObject *pair = Py_BuildValue("(Oi)", S.stacks[i].places[k].code, S.stacks[i].places[k].instruction);
            if (!pair) goto failed;
            PyList_SET_ITEM(stack, k, pair);
        }
    }
    for (size_t i = 0; i < S.row_count; i++) {
        Row *r = &S.rows[i];
        PyObject *row = Py_BuildValue("(LiiLLLLLi)", r->time, r->thread, r->stack, r->wall, r->cpu, r->core, r->look, r->late, r->state);
        if (!row) goto failed;
        PyList_SET_ITEM(rows, i, row);
    }
    for (int i = 0; i < S.thread_count; i++) {
        PyObject *name = S.threads[i].name ? S.threads[i].name : Py_None;
        PyObject *pair = Py_BuildValue("(Okl)", name, S.threads[i].ident, S.threads[i].tid);
        if (!pair) goto failed;
        PyList_SET_ITEM(threads, i, pair);
    }
    return Py_BuildValue("(NNNLL)", stacks, rows, threads, S.looks, S.spent + S.ticker_cpu);
failed:
    Py_XDECREF(stacks), Py_XDECREF(rows), Py_XDECREF(threads);
    return NULL;
}
