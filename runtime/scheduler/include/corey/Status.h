//===- Status.h - Errors without exceptions ---------------------*- C++ -*-===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//
///
/// \file
/// `Status` reports whether an operation succeeded and, if not, why.
/// `Expected<T>` holds either the value an operation produced or the `Status`
/// that says why there is none. Neither throws, and neither needs RTTI, so the
/// header serves consumers built with -fno-exceptions and -fno-rtti alike.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_STATUS_H
#define COREY_STATUS_H

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace corey {

/// The kind of a failure, for callers that react to it rather than print it.
enum class StatusCode {
  /// The operation succeeded.
  Ok,
  /// An argument, or a file's content, breaks the operation's contract.
  InvalidArgument,
  /// The named thing does not exist.
  NotFound,
  /// The operating system refused or failed an input or output operation.
  IOError,
  /// A program could not be compiled.
  CompileError,
  /// The request is well formed but outside what COREY implements.
  Unsupported,
  /// Memory could not be allocated.
  OutOfMemory,
  /// A defect in COREY itself.
  Internal,
  /// A device or its driver reported an error.
  DeviceError,
};

/// Returns the spelling of \p Code used in printed errors, such as
/// "invalid argument".
inline const char *statusCodeName(StatusCode Code) {
  switch (Code) {
  case StatusCode::Ok:
    return "ok";
  case StatusCode::InvalidArgument:
    return "invalid argument";
  case StatusCode::NotFound:
    return "not found";
  case StatusCode::IOError:
    return "input/output error";
  case StatusCode::CompileError:
    return "compile error";
  case StatusCode::Unsupported:
    return "unsupported";
  case StatusCode::OutOfMemory:
    return "out of memory";
  case StatusCode::Internal:
    return "internal error";
  case StatusCode::DeviceError:
    return "device error";
  }
  return "unknown";
}

/// The outcome of an operation that produces no value. Success is one null
/// pointer, so returning and testing it costs no allocation; copies of a
/// failure share one message.
class [[nodiscard]] Status {
public:
  /// Constructs success.
  Status() = default;

  /// Constructs the outcome \p Code with \p Message. The message of
  /// `StatusCode::Ok` is dropped.
  Status(StatusCode Code, std::string Message) {
    if (Code != StatusCode::Ok)
      Failure = std::make_shared<const Info>(Info{Code, std::move(Message)});
  }

  /// Returns success.
  static Status ok() { return Status(); }

  /// Returns a failure of kind `StatusCode::InvalidArgument`.
  static Status invalidArgument(std::string Message) {
    return Status(StatusCode::InvalidArgument, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::NotFound`.
  static Status notFound(std::string Message) {
    return Status(StatusCode::NotFound, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::IOError`.
  static Status ioError(std::string Message) {
    return Status(StatusCode::IOError, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::CompileError`.
  static Status compileError(std::string Message) {
    return Status(StatusCode::CompileError, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::Unsupported`.
  static Status unsupported(std::string Message) {
    return Status(StatusCode::Unsupported, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::OutOfMemory`.
  static Status outOfMemory(std::string Message) {
    return Status(StatusCode::OutOfMemory, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::Internal`.
  static Status internal(std::string Message) {
    return Status(StatusCode::Internal, std::move(Message));
  }
  /// Returns a failure of kind `StatusCode::DeviceError`.
  static Status deviceError(std::string Message) {
    return Status(StatusCode::DeviceError, std::move(Message));
  }

  /// Returns whether the operation succeeded.
  bool isOk() const { return !Failure; }
  /// Returns whether the operation succeeded, as `isOk()` does.
  explicit operator bool() const { return isOk(); }

  /// Returns the kind of the failure, or `StatusCode::Ok`.
  StatusCode code() const { return Failure ? Failure->Code : StatusCode::Ok; }

  /// Returns the failure's message, or an empty string on success. The
  /// reference lives as long as any copy of this status; on success it lives
  /// forever.
  const std::string &message() const {
    static const std::string Empty;
    return Failure ? Failure->Message : Empty;
  }

  /// Returns "ok", or "<kind>: <message>" for printing.
  std::string toString() const {
    if (isOk())
      return "ok";
    return std::string(statusCodeName(code())) + ": " + message();
  }

private:
  struct Info {
    StatusCode Code;
    std::string Message;
  };
  std::shared_ptr<const Info> Failure;
};

namespace detail {
/// Ends the process because the value of a failed `Expected` was used. Reading
/// it anyway would be undefined behaviour that an optimised build hides.
[[noreturn]] inline void abortOnMissingValue(const Status &Reason) {
  std::fprintf(stderr, "corey: value of a failed Expected was used: %s\n",
               Reason.toString().c_str());
  std::abort();
}
} // namespace detail

/// Either a `T` or the `Status` that says why there is no `T`. `T` may be
/// move-only; it may be neither a reference nor a `Status`. Using the value of
/// a failure prints its message and aborts, in every build mode.
template <class T> class [[nodiscard]] Expected {
  static_assert(!std::is_reference_v<T>, "hold a pointer instead");
  static_assert(!std::is_same_v<std::remove_cv_t<T>, Status>,
                "return the Status itself instead");

public:
  /// Constructs a success from anything that converts to `T`.
  template <class U = T,
            std::enable_if_t<std::is_convertible_v<U &&, T> &&
                                 !std::is_same_v<std::decay_t<U>, Status> &&
                                 !std::is_same_v<std::decay_t<U>, Expected<T>>,
                             int> = 0>
  Expected(U &&Val) : Value(std::in_place, std::forward<U>(Val)) {}

  /// Constructs a failure. \p Reason must not be ok: a success without a value
  /// is a defect of the caller and is turned into `StatusCode::Internal`.
  Expected(Status Reason) : Why(std::move(Reason)) {
    if (Why.isOk())
      Why = Status::internal("Expected was built from a successful Status; "
                             "expected a value or a failure");
  }

  /// Returns whether there is a value.
  explicit operator bool() const { return Value.has_value(); }

  /// Returns the value; aborts if there is none.
  T &operator*() & { return *checked(); }
  /// Returns the value; aborts if there is none.
  const T &operator*() const & {
    if (!Value)
      detail::abortOnMissingValue(Why);
    return *Value;
  }
  /// Returns the value for moving out; aborts if there is none.
  T &&operator*() && { return std::move(*checked()); }
  /// Accesses a member of the value; aborts if there is none.
  T *operator->() { return checked(); }
  /// Accesses a member of the value; aborts if there is none.
  const T *operator->() const { return &**this; }

  /// Returns the reason of the failure, or an ok status.
  const Status &status() const { return Why; }

  /// Moves the reason of the failure out, or returns an ok status. Afterwards
  /// the object still holds no value, and `status()` is unspecified.
  Status takeStatus() { return std::move(Why); }

private:
  T *checked() {
    if (!Value)
      detail::abortOnMissingValue(Why);
    return &*Value;
  }

  std::optional<T> Value;
  Status Why;
};

} // namespace corey

#endif // COREY_STATUS_H
